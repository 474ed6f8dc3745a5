/* A rendezvous that NCCL's ranks join by: its id reaches all, and no GPU is two ranks'.
 *
 * Two ranks on one GPU are a hang of NCCL unless it has been told of them
 * (NCCL_MULTI_RANK_GPU_ENABLE); here they are refused before it is called.
 */
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"
#include "rendezvous.h"

enum { UUID_BYTES = 16 };

/* What ranks tell each other; every byte is set. */
typedef struct nccl_card {
    tn_comm_id id; /* rank 0's counts */
    unsigned char uuid[UUID_BYTES];
} nccl_card;

static tn_status fill_card(const tn_rendezvous *ranks, tn_device *device, nccl_card *out) {
    const tn__driver *driver = tn__device_driver(device);
    if (driver->uuid) TN_TRY(driver->uuid(tn__device_state(device), out->uuid));
    return ranks->place.rank == 0 ? tn_comm_id_create(&out->id) : TN_OK;
}

static int is_known(const nccl_card *card) {
    static const unsigned char unknown[UUID_BYTES];
    return memcmp(card->uuid, unknown, sizeof unknown) != 0;
}

static int may_share_a_gpu(void) {
    const char *text = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return text && *text && strcmp(text, "0") != 0;
}

static tn_status check_cards(const nccl_card *cards, int rank_count) {
    for (int rank = 1; rank < rank_count && !may_share_a_gpu(); rank++) {
        for (int other = 0; other < rank; other++) {
            if (!is_known(&cards[rank]) ||
                memcmp(cards[rank].uuid, cards[other].uuid, UUID_BYTES) != 0)
                continue;
            return TN_FAIL(TN_INVALID_ARGUMENT,
                           "ranks %d and %d are on one GPU, and NCCL would hang: each rank opens a "
                           "device of its own (tn_rendezvous_local_rank says which)",
                           other, rank);
        }
    }
    return TN_OK;
}

tn_status tn__rendezvous_make_id(tn_rendezvous *ranks, tn_device *device, uint64_t timeout_us,
                                 tn_comm_id *out) {
    _Static_assert(sizeof(nccl_card) <= TN__ROOM_BYTES, "the ids' meeting takes no memory");
    nccl_card card, *cards = tn__host_alloc((size_t)ranks->place.rank_count, sizeof *cards);
    memset(&card, 0, sizeof card);
    tn_status status = cards ? fill_card(ranks, device, &card) : TN_OUT_OF_HOST_MEMORY;
    status = tn__rendezvous_share_status(ranks, status, timeout_us);
    if (status == TN_OK && cards) {
        status = tn__rendezvous_gather(ranks, "the id of an NCCL communicator", &card, sizeof card,
                                       cards, timeout_us);
        if (status == TN_OK) status = check_cards(cards, ranks->place.rank_count);
        if (status == TN_OK) *out = cards[0].id;
    }
    tn__host_free(cards);
    return status;
}
