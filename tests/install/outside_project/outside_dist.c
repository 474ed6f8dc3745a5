/* A program outside the tree, in C, of libtenure-dist: it loads and says what a config lacks. */
#include <stdio.h>
#include <tenure/tenure_dist.h>

int main(void) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *comm = NULL;
    if (tn_comm_create(&config, &comm) != TN_INVALID_ARGUMENT || comm) return 1;
    printf("outside_dist: %s\n", tn_error_last());
    return tn_comm_destroy(comm) == TN_OK ? 0 : 2;
}
