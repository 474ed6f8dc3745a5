/* A library that exports a name of the driver's and is none: who asks it gets its own. */
int cuMemAlloc_v2(unsigned long long *out, unsigned long long bytes);
int cuMemAlloc_v2(unsigned long long *out, unsigned long long bytes) {
    (void)out;
    (void)bytes;
    return 4711;
}
