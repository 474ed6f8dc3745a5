/* What libtenure-jemalloc.so sets apart from Debian's build: see jemalloc.cmake.
 *
 * jemalloc reads these settings after MALLOC_CONF, which is meant for a jemalloc of the program's
 * own. It takes extents as large as it needs and no larger, since they may be pinned memory, and
 * gives them back. It registers no fork handlers: they would take some hundred locks at each fork
 * of the program, and a forked child makes no call (alloc/driver_state.c).
 */
extern const char *tn__je_malloc_conf_2_conf_harder;
int tn__je_pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void));

const char *tn__je_malloc_conf_2_conf_harder =
    "narenas:1,tcache:false,background_thread:false,prof:false,stats_print:false,"
    "retain:false";

int tn__je_pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void)) {
    (void)prepare;
    (void)parent;
    (void)child;
    return 0;
}
