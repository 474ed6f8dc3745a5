/* Engines that are not there: the status, and words that say what was looked for. */
#include "test_support.h"

#include <stdlib.h>
#include <string.h>

#include "tenure_rendezvous.h"

static tn_status create(tn_device *device, tn_comm_engine engine) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm *comm = NULL;
    config.device = device;
    config.engine = engine;
    tn_status status = tn_comm_create(&config, &comm);
    assert_null(comm);
    return status;
}

static void a_missing_mpi_engine_is_named(void **state) {
    (void)state;
    tn_device *device = test_open_host();
    EXPECT_STATUS(create(device, TN_COMM_AUTO), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("no MPI engine: ");
    EXPECT_ERROR_HAS("/libtenure-mpi-missing.so");
    EXPECT_ERROR_HAS("TENURE_MPI_LIBRARY");
    EXPECT_OK(tn_device_destroy(device));
}

static void a_missing_nccl_is_named(void **state) {
    (void)state;
    tn_comm_id id = {{9}};
    EXPECT_STATUS(tn_comm_id_create(&id), TN_UNSUPPORTED);
    assert_int_equal(id.bytes[0], 9);
    if (strstr(tn_error_last(), "built without NCCL")) return; /* TENURE_NCCL=OFF */
    EXPECT_ERROR_HAS(TENURE_WITH_NCCL ? "libnccl-missing.so.2" : "was built without NCCL");
    EXPECT_ERROR_HAS(TENURE_WITH_NCCL ? "TENURE_NCCL_LIBRARY" : "TENURE_NCCL=AUTO");
}

static void nccl_is_for_real_gpus(void **state) {
    (void)state;
    tn_device *host = test_open_host(), *sim = test_open_sim(0, 0);
    EXPECT_STATUS(create(host, TN_COMM_NCCL), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("the NCCL engine works on real CUDA devices");
    EXPECT_STATUS(create(sim, TN_COMM_NCCL), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("the NCCL engine works on real CUDA devices");
    EXPECT_STATUS(create(sim, TN_COMM_AUTO), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("no MPI engine");
    test_close_sim(sim);
    EXPECT_OK(tn_device_destroy(host));
}

static void tcp_needs_a_host_device_and_a_rendezvous(void **state) {
    (void)state;
    tn_device *host = test_open_host(), *sim = test_open_sim(0, 0);
    EXPECT_STATUS(create(host, TN_COMM_TCP), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("rendezvous is NULL, and the engine is TCP");
    EXPECT_STATUS(create(sim, TN_COMM_TCP), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("the TCP engine works on host devices");
    test_close_sim(sim);
    EXPECT_OK(tn_device_destroy(host));
}

/* One rank needs no network and no launcher. */
static void a_rank_alone_meets_itself(void **state) {
    (void)state;
    tn_device *host = test_open_host();
    tn_rendezvous_config how = TN_RENDEZVOUS_CONFIG_INIT;
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_rendezvous *ranks = NULL;
    tn_comm *comm = NULL;
    how.rank_count = 1;
    EXPECT_OK(tn_rendezvous_create(&how, &ranks));
    config.device = host;
    config.rendezvous = ranks;
    config.engine = TN_COMM_MPI;
    EXPECT_STATUS(tn_comm_create(&config, &comm), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("a rendezvous is for TCP and NCCL");
    config.engine = TN_COMM_AUTO;
    config.rank_count = 1;
    EXPECT_STATUS(tn_comm_create(&config, &comm), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("the rendezvous says them");
    config.rank_count = 0;
    EXPECT_OK(tn_comm_create(&config, &comm));
    assert_string_equal(tn_comm_engine_name(comm), "TCP");
    EXPECT_OK(tn_barrier(comm, NULL));
    EXPECT_OK(tn_comm_destroy(comm));
    tn_rendezvous_destroy(ranks);
    EXPECT_OK(tn_device_destroy(host));
}

static void nothing_has_no_ranks(void **state) {
    (void)state;
    assert_int_equal(tn_comm_rank(NULL), -1);
    assert_int_equal(tn_comm_size(NULL), 0);
    assert_string_equal(tn_comm_name(NULL), "");
    assert_string_equal(tn_comm_engine_name(NULL), "");
    assert_int_equal(tn_rendezvous_rank(NULL), -1);
    assert_int_equal(tn_rendezvous_size(NULL), 0);
    assert_int_equal(tn_rendezvous_local_rank(NULL), -1);
}

int main(void) {
    /* Before the first call reads the options. */
    setenv("TENURE_MPI_LIBRARY", "libtenure-mpi-missing.so", 1);
    setenv("TENURE_NCCL_LIBRARY", "libnccl-missing.so.2", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_missing_mpi_engine_is_named),
        cmocka_unit_test(a_missing_nccl_is_named),
        cmocka_unit_test(nccl_is_for_real_gpus),
        cmocka_unit_test(tcp_needs_a_host_device_and_a_rendezvous),
        cmocka_unit_test(a_rank_alone_meets_itself),
        cmocka_unit_test(nothing_has_no_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
