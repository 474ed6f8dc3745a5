/* How rows are cut over ranks: see parallel_rows.h. */
#include "parallel_call.h"

#include "comm.h"
#include "error.h"
#include "host_alloc.h"
#include "tensor_internal.h"

/* So many that neither bytes nor tiles of them overflow with any columns that a tensor can have. */
#define ROWS_MAX ((int64_t)1 << 40)

static int64_t rows_of(const tn__row_cut *cut, int rank) {
    return cut->told ? cut->told[rank] : cut->own;
}

tn__row_part tn__row_part_first(const tn__row_cut *cut) {
    return (tn__row_part){.rows = rows_of(cut, 0)};
}

tn__row_part tn__row_part_next(const tn__row_cut *cut, int rank, const tn__row_part *part) {
    return (tn__row_part){.rows = rows_of(cut, rank),
                          .first = part->first + part->rows,
                          .first_in_tiles =
                              tn__up_to(part->first_in_tiles + part->rows, TN__TILE_ROWS)};
}

static tn_status check_told(const char *call, const tn__row_cut *cut) {
    for (int rank = 0; cut->told && rank < cut->ranks; rank++)
        TN_REQUIRE(cut->told[rank] >= 0 && cut->told[rank] <= ROWS_MAX,
                   "%s: sequence.rows says %lld for rank %d", call, (long long)cut->told[rank],
                   rank);
    TN_REQUIRE(!cut->told || cut->told[cut->rank] == cut->own,
               "%s: sequence.rows says %lld for this rank, %d, whose rows are %lld", call,
               (long long)cut->told[cut->rank], cut->rank, (long long)cut->own);
    TN_REQUIRE(cut->own <= ROWS_MAX, "%s: %lld rows are too many", call, (long long)cut->own);
    return TN_OK;
}

tn_status tn__row_cut_make(const char *call, const tn_sequence *sequence, int64_t own,
                           tn__row_cut *out) {
    tn__row_part part;
    TN_REQUIRE(sequence->comm, "%s: sequence.comm is NULL", call);
    *out = (tn__row_cut){.comm = sequence->comm,
                         .rank = tn_comm_rank(sequence->comm),
                         .ranks = tn_comm_size(sequence->comm),
                         .told = sequence->rows,
                         .own = own};
    TN_TRY(check_told(call, out));
    part = tn__row_part_first(out);
    for (int rank = 0;;) {
        out->total = part.first + part.rows;
        if (part.rows > 0) out->total_in_tiles = part.first_in_tiles + part.rows;
        if (++rank == out->ranks) return TN_OK;
        part = tn__row_part_next(out, rank, &part);
    }
}

/* ---- counts from all ranks ------------------------------------------------------------------- */

static tn_status make_numbers(tn_scope scope, const char *name, int64_t count, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = TN_BYTE;
    config.rank = 1;
    config.shape[0] = count * (int64_t)sizeof(int64_t);
    config.name = name;
    return tn_tensor_create(scope, &config, out);
}

static tn_status gather_numbers(tn_comm *comm, tn_tensor own, tn_tensor all, size_t bytes,
                                tn_stream stream) {
    tn_lease reading, writing;
    tn_plane_view src, dst;
    TN_TRY(tn_lease_begin(own, TN_PLANE_DATA, TN_READ, stream, &reading, &src));
    tn_status status = tn_lease_begin(all, TN_PLANE_DATA, TN_WRITE, stream, &writing, &dst);
    if (status == TN_OK) {
        status = tn_all_gather(comm, src.data, dst.data, bytes, stream);
        status = tn__lease_close(writing, status);
    }
    return tn__lease_close(reading, status);
}

static tn_status exchange(tn_comm *comm, const int64_t *own, size_t bytes, int64_t *all,
                          const tn_tensor tensors[2], tn_stream stream) {
    const size_t all_bytes = bytes * (size_t)tn_comm_size(comm);
    tn_device *device;
    TN_TRY(tn__tensor_device(tensors[0], &device));
    TN_TRY(tn_plane_write(tensors[0], TN_PLANE_DATA, own, bytes, NULL, 0, stream));
    tn_status status = gather_numbers(comm, tensors[0], tensors[1], bytes, stream);
    if (status == TN_OK) status = tn_comm_wait(comm);
    if (status == TN_OK)
        status = tn_plane_read(tensors[1], TN_PLANE_DATA, all, all_bytes, NULL, 0, stream);
    /* Also after a failure: the copies from and to the caller's memory end here. */
    const tn_status waited = tn_stream_synchronize(device, stream);
    return status == TN_OK ? waited : status;
}

tn_status tn_counts_exchange(tn_comm *comm, const int64_t *own, int64_t count, int64_t *all,
                             tn_scope scope, tn_stream stream) {
    static const char call[] = "tn_counts_exchange";
    tn_tensor tensors[2] = {{0}, {0}};
    int64_t *numbers;
    TN_REQUIRE(comm, "%s: comm is NULL", call);
    TN_REQUIRE(count >= 0 && count <= INT32_MAX, "%s: %lld counts", call, (long long)count);
    TN_REQUIRE(count == 0 || (own && all), "%s: own or all is NULL", call);
    if (count == 0) return TN_OK;
    TN_TRY(tn__refuse_capture(comm->device, stream, call));
    const int64_t all_count = count * tn_comm_size(comm);
    numbers = tn__host_alloc((size_t)all_count, sizeof *numbers);
    if (!numbers) return TN_OUT_OF_HOST_MEMORY;
    const uint64_t puts = tn__comm_puts(comm);
    tn_status status = make_numbers(scope, "own counts", count, &tensors[0]);
    if (status == TN_OK) status = make_numbers(scope, "all counts", all_count, &tensors[1]);
    if (status == TN_OK)
        status = exchange(comm, own, (size_t)count * sizeof *own, numbers, tensors, stream);
    for (int i = 0; i < 2; i++)
        status = tn__tensor_close(tensors[i], stream, status);
    status = tn__comm_end_call(comm, call, puts, status);
    for (int64_t i = 0; status == TN_OK && i < all_count; i++)
        all[i] = numbers[i];
    tn__host_free(numbers);
    return status;
}
