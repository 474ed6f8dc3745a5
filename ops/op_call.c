/* What every op does before and after its work: see op_call.h. */
#include "op_call.h"

#include <string.h>

#include "host_alloc.h"
#include "lease.h"
#include "tensor_internal.h"

tn__op_call tn__op_begin(const char *name, tn_stream stream) {
    tn__op_call call;
    memset(&call, 0, sizeof call);
    call.name = name;
    call.stream = stream;
    return call;
}

/* ---- checks ---------------------------------------------------------------------------------- */

tn_status tn__op_tensor(tn__op_call *call, const char *role, tn_tensor tensor,
                        tn_tensor_info *info) {
    *info = (tn_tensor_info)TN_TENSOR_INFO_INIT;
    TN_TRY(tn_tensor_info_get(tensor, info));
    tn_device *device = tn_pool_device(info->pool);
    if (!call->device) {
        call->device = device;
        call->ops = tn__op_table_of(device);
    }
    TN_REQUIRE(device == call->device,
               "%s: %s (tensor %s) is of another device than the tensors before it", call->name,
               role, info->name);
    return TN_OK;
}

tn_status tn__op_require_float(const tn__op_call *call, const char *role,
                               const tn_tensor_info *info) {
    TN_REQUIRE(info->format == TN_FORMAT_PLAIN && info->dtype != TN_BYTE,
               "%s: %s (tensor %s) is %s %s, expected %s fp32, bf16 or fp16", call->name, role,
               info->name, tn_format_name(info->format), tn_dtype_name(info->dtype),
               tn_format_name(TN_FORMAT_PLAIN));
    return TN_OK;
}

tn_status tn__op_require_format(const tn__op_call *call, const char *role,
                                const tn_tensor_info *info, tn_format format) {
    TN_REQUIRE(info->format == format, "%s: %s (tensor %s) is %s, expected %s", call->name, role,
               info->name, tn_format_name(info->format), tn_format_name(format));
    return TN_OK;
}

tn_status tn__op_require_dtype(const tn__op_call *call, const char *role,
                               const tn_tensor_info *info, tn_dtype dtype) {
    TN_REQUIRE(info->dtype == dtype, "%s: %s (tensor %s) has elements of %s, expected %s",
               call->name, role, info->name, tn_dtype_name(info->dtype), tn_dtype_name(dtype));
    return TN_OK;
}

tn_status tn__op_require_shape(const tn__op_call *call, const char *role,
                               const tn_tensor_info *info, int64_t rows, int64_t cols,
                               const char *reason) {
    TN_REQUIRE(info->rows == rows && info->cols == cols,
               "%s: %s (tensor %s) is %lld x %lld, expected %lld x %lld: %s", call->name, role,
               info->name, (long long)info->rows, (long long)info->cols, (long long)rows,
               (long long)cols, reason);
    return TN_OK;
}

/* ---- leases ---------------------------------------------------------------------------------- */

static int is_one_of(const tn_tensor *tensors, int count, tn_tensor tensor) {
    for (int i = 0; i < count; i++) {
        if (tensors[i].value == tensor.value) return 1;
    }
    return 0;
}

tn_status tn__op_require_apart(const tn__op_call *call, const tn__op_named *outputs,
                               int output_count, const tn__op_named *operands, int operand_count) {
    tn__element_range ranges[TN__OP_APART_MAX];
    TN_CHECK(operand_count <= TN__OP_APART_MAX);
    for (int i = 0; i < operand_count; i++) {
        if (tn__is_no_tensor(operands[i].tensor) ||
            tn__tensor_elements(operands[i].tensor, &ranges[i]) != TN_OK)
            ranges[i] = (tn__element_range){.owner = NULL};
    }
    for (int i = 0; i < output_count; i++) {
        tn__element_range range;
        if (tn__is_no_tensor(outputs[i].tensor)) continue;
        TN_TRY(tn__tensor_elements(outputs[i].tensor, &range));
        for (int j = 0; j < operand_count; j++)
            TN_REQUIRE(!tn__ranges_overlap(&range, &ranges[j]),
                       "%s: %s and %s share memory: one would overwrite the other", call->name,
                       outputs[i].role, operands[j].role);
    }
    return TN_OK;
}

/* Made by the call. */
static int is_own(const tn__op_call *call, tn_tensor tensor) {
    return is_one_of(call->scratch, call->scratch_count, tensor) ||
           is_one_of(call->saved, call->saved_count, tensor);
}

tn_status tn__op_reserve_leases(tn__op_call *call, int count) {
    TN_CHECK(call->lease_count == 0 && !call->more_leases);
    if (count <= TN__OP_LEASES_MAX) return TN_OK;
    call->more_count = count - TN__OP_LEASES_MAX;
    call->more_leases = tn__host_alloc((size_t)call->more_count, sizeof *call->more_leases);
    return call->more_leases ? TN_OK : TN_OUT_OF_HOST_MEMORY;
}

static tn__op_lease_slot *slot_at(const tn__op_call *call, int index) {
    if (index < TN__OP_LEASES_MAX) return (tn__op_lease_slot *)&call->leases[index];
    return &call->more_leases[index - TN__OP_LEASES_MAX];
}

/* Tells the pool of an output's use: before any work, so that nothing that follows the work needs
 * memory for it. */
static tn_status announce(const tn__op_call *call, const tn__op_lease_slot *slot) {
    TN_TRY(tn_record_use(slot->blocks[0], call->stream));
    return tn_record_use(slot->blocks[1], call->stream);
}

tn_status tn__op_lease(tn__op_call *call, tn_tensor tensor, tn_plane plane, tn_access access,
                       tn_plane_view *view) {
    TN_CHECK(call->lease_count < TN__OP_LEASES_MAX + (call->more_leases ? call->more_count : 0));
    tn__op_lease_slot *slot = slot_at(call, call->lease_count);
    TN_TRY(tn_lease_begin(tensor, plane, access, call->stream, &slot->lease, view));
    slot->tensor = tensor;
    slot->plane = plane;
    slot->is_output = access != TN_READ && !is_own(call, tensor);
    slot->runs_before = call->runs;
    slot->is_derived = 0;
    call->lease_count++;
    if (!slot->is_output) return TN_OK;
    TN_TRY(tn__tensor_pool_blocks(tensor, plane, slot->blocks));
    return announce(call, slot);
}

void tn__op_hold(tn__op_call *call) { slot_at(call, call->lease_count - 1)->is_held = 1; }

void tn__op_hold_no_more(tn__op_call *call) {
    for (int i = 0; i < call->lease_count; i++) {
        tn__op_lease_slot *slot = slot_at(call, i);
        if (slot->is_held) slot->runs_before = call->runs;
        slot->is_held = 0;
    }
}

tn_status tn__op_lease_matrix(tn__op_call *call, tn_tensor tensor, const tn_tensor_info *info,
                              tn_access access, tn__matrix *matrix) {
    tn_plane_view view;
    TN_TRY(tn__op_lease(call, tensor, TN_PLANE_DATA, access, &view));
    *matrix = (tn__matrix){info->dtype, view.data, info->rows, info->cols};
    return TN_OK;
}

tn_status tn__op_lease_skip(tn__op_call *call, tn_tensor skip, const float **out) {
    tn_tensor_info info;
    tn_plane_view view;
    *out = NULL;
    if (tn__is_no_tensor(skip)) return TN_OK;
    TN_TRY(tn__op_tensor(call, "skip", skip, &info));
    TN_TRY(tn__op_require_format(call, "skip", &info, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, "skip", &info, TN_FP32));
    TN_REQUIRE(info.rows * info.cols == 1, "%s: skip (tensor %s) has %lld elements, expected 1",
               call->name, info.name, (long long)(info.rows * info.cols));
    TN_TRY(tn__op_lease(call, skip, TN_PLANE_DATA, TN_READ, &view));
    *out = view.data;
    return TN_OK;
}

tn_status tn__op_require_whole_16(const tn__op_call *call, uintptr_t addresses) {
    if (call->ops->is_whole) return TN_OK;
    TN_REQUIRE(addresses % 16 == 0,
               "%s: an operand is not aligned to 16 bytes, as a view may be: give it a copy",
               call->name);
    return TN_OK;
}

tn_status tn__op_require_kept(const tn__op_call *call, const float *skip, const char *role,
                              tn_tensor tensor, tn_plane plane) {
    tn_plane_state state;
    if (!skip) return TN_OK;
    TN_TRY(tn_plane_state_get(tensor, plane, &state));
    if (state == TN_PLANE_VALID) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE,
                   "%s: plane %s of %s is not valid, which the skip flag may leave as it is",
                   call->name, tn_plane_name(plane), role);
}

/* Whether the call has had the plane derived ahead; its lease answers for it from now on. */
static int take_derived(tn__op_call *call, tn_tensor tensor, tn_plane plane) {
    for (int i = 0; i < call->derived_count; i++) {
        if (call->derived[i].tensor.value != tensor.value || call->derived[i].plane != plane)
            continue;
        call->derived[i] = call->derived[--call->derived_count];
        return 1;
    }
    return 0;
}

tn_status tn__op_lease_derived(tn__op_call *call, tn_tensor tensor, tn_plane plane,
                               tn_plane_view *view) {
    tn_plane_state before = TN_PLANE_VALID;
    TN_TRY(tn_plane_state_get(tensor, plane, &before));
    TN_TRY(tn__op_lease(call, tensor, plane, TN_READ, view));
    if (take_derived(call, tensor, plane) || before == TN_PLANE_ABSENT)
        slot_at(call, call->lease_count - 1)->is_derived = 1;
    return TN_OK;
}

tn_status tn__op_await(const tn__op_call *call, tn_tensor tensor, tn_plane plane) {
    tn_plane_state state = TN_PLANE_ABSENT;
    tn_plane_view view;
    tn_lease lease;
    TN_TRY(tn_plane_state_get(tensor, plane, &state));
    if (state != TN_PLANE_VALID) return TN_OK;
    TN_TRY(tn_lease_begin(tensor, plane, TN_READ, call->stream, &lease, &view));
    const tn_status status = tn_lease_end(lease);
    if (status != TN_OK) TN_CHECK(tn_lease_abandon(lease) == TN_OK);
    return status;
}

static int spared_by(const tn__op_call *call, tn_tensor tensor, tn_plane plane,
                     const tn__gemm_work *beside) {
    tn_plane_layout layout;
    if (!call->ops->gemm_spares || beside->contracted == 0) return 0;
    if (beside->d.rows == 0 || beside->d.cols == 0) return 0;
    if (tn_plane_layout_get(tensor, plane, &layout) != TN_OK) return 0;
    return call->ops->gemm_spares(call->device, beside, layout.data_bytes);
}

tn_status tn__op_derive_ahead(tn__op_call *call, tn_tensor tensor, tn_plane plane, tn_stream side,
                              tn__gemm_work *beside) {
    tn_plane_state before = TN_PLANE_VALID;
    tn__saved_error error;
    TN_TRY(tn_plane_state_get(tensor, plane, &before));
    if (before == TN_PLANE_VALID) return TN_OK;
    TN_TRY(tn_stream_wait(call->device, side, call->stream));
    tn__error_save(&error);
    const int spared = spared_by(call, tensor, plane, beside);
    tn__op_derive_on(spared);
    tn_status status = tn_plane_require(tensor, plane, side);
    tn__op_derive_on(0);
    if (status == TN_OK) beside->spared = spared;
    if (status == TN_OUT_OF_DEVICE_MEMORY || status == TN_IN_USE) {
        tn__error_restore(&error);
        return TN_OK;
    }
    if (status != TN_OK || before != TN_PLANE_ABSENT) return status;
    TN_CHECK(call->derived_count < TN__OP_DERIVED_MAX);
    call->derived[call->derived_count++] = (tn__op_derived){tensor, plane};
    return TN_OK;
}

tn_status tn__op_end_lease(tn__op_call *call, int index) {
    tn__op_lease_slot *slot = slot_at(call, index);
    TN_CHECK(index < call->lease_count);
    TN_TRY(tn_lease_end(slot->lease));
    slot->lease.value = 0;
    return TN_OK;
}

tn_status tn__op_end_plane(tn__op_call *call, tn_tensor tensor, tn_plane plane) {
    for (int i = 0; i < call->lease_count; i++) {
        const tn__op_lease_slot *slot = slot_at(call, i);
        if (slot->lease.value == 0 || slot->tensor.value != tensor.value) continue;
        if (slot->plane == plane) TN_TRY(tn__op_end_lease(call, i));
    }
    return TN_OK;
}

tn_status tn__op_ran(tn__op_call *call, tn_status status) {
    if (status == TN_OK || !call->ops->is_whole) call->runs++;
    return status;
}

/* ---- scratch --------------------------------------------------------------------------------- */

tn_status tn__op_create(const tn__op_call *call, tn_scope scope, const tn_tensor_config *config,
                        tn_tensor *out) {
    tn_device *device;
    TN_TRY(tn__scope_device(scope, &device));
    TN_REQUIRE(device == call->device,
               "%s: the scope for %s is of another device than the call's tensors", call->name,
               config->name);
    return tn_tensor_create(scope, config, out);
}

tn_status tn__op_scratch(tn__op_call *call, tn_scope scope, const tn_tensor_config *config,
                         tn_tensor *out) {
    TN_CHECK(call->scratch_count < TN__OP_SCRATCH_MAX);
    TN_REQUIRE(scope.value != 0, "%s: scope is {0}, but the op needs scratch memory: name a scope",
               call->name);
    TN_TRY(tn__op_create(call, scope, config, out));
    call->scratch[call->scratch_count++] = *out;
    return TN_OK;
}

tn_status tn__op_let_go(tn__op_call *call, tn_tensor tensor) {
    TN_CHECK(is_own(call, tensor));
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++)
        TN_TRY(tn__op_end_plane(call, tensor, (tn_plane)plane));
    for (int i = 0; i < call->scratch_count; i++) {
        if (call->scratch[i].value != tensor.value) continue;
        TN_TRY(tn_tensor_destroy(tensor, call->stream));
        call->scratch[i] = call->scratch[--call->scratch_count];
    }
    return TN_OK;
}

tn_status tn__op_saved(tn__op_call *call, tn_scope scope, const tn_tensor_config *config,
                       tn_tensor *out) {
    TN_CHECK(call->saved_count < TN__OP_SAVED_MAX);
    TN_TRY(tn__op_create(call, scope, config, out));
    call->saved[call->saved_count++] = *out;
    return TN_OK;
}

void tn__op_spend(tn__op_call *call, tn_tensor *tensor) {
    if (tn__is_no_tensor(*tensor)) return;
    TN_CHECK(call->spent_count < TN__OP_SPENT_MAX);
    call->spent[call->spent_count++] = tensor;
}

tn_status tn__op_scratch_bytes(tn__op_call *call, tn_scope scope, size_t bytes, void **out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_plane_view view;
    tn_tensor tensor = {0};
    *out = NULL;
    if (bytes == 0) return TN_OK;
    config.dtype = TN_BYTE;
    config.rank = 1;
    config.shape[0] = (int64_t)bytes;
    config.name = "op workspace";
    TN_TRY(tn__op_scratch(call, scope, &config, &tensor));
    TN_TRY(tn__op_lease(call, tensor, TN_PLANE_DATA, TN_WRITE, &view));
    slot_at(call, call->lease_count - 1)->blocks[0] = view.data;
    *out = view.data;
    return TN_OK;
}

tn_status tn__op_let_go_bytes(tn__op_call *call, const void *bytes) {
    for (int i = 0; bytes && i < call->lease_count; i++) {
        const tn__op_lease_slot *slot = slot_at(call, i);
        if (slot->lease.value == 0 || slot->is_output || slot->blocks[0] != bytes) continue;
        return tn__op_let_go(call, slot->tensor);
    }
    return TN_OK;
}

/* ---- the end --------------------------------------------------------------------------------- */

static tn_status end_leases(tn__op_call *call, int outputs) {
    for (int i = 0; i < call->lease_count; i++) {
        const tn__op_lease_slot *slot = slot_at(call, i);
        if (slot->lease.value == 0 || slot->is_output != outputs) continue;
        TN_TRY(tn__op_end_lease(call, i));
    }
    return TN_OK;
}

static tn_status destroy_all(const tn__op_call *call, const tn_tensor *tensors, int *count) {
    while (*count > 0) {
        TN_TRY(tn_tensor_destroy(tensors[*count - 1], call->stream));
        --*count;
    }
    return TN_OK;
}

/* The call has succeeded whatever becomes of it: what someone else holds under a lease, or the
 * driver does not free, ends with its scope. */
static void destroy_spent(const tn__op_call *call) {
    tn__saved_error error;
    for (int i = call->spent_count - 1; i >= 0; i--) {
        tn__error_save(&error);
        if (tn_tensor_destroy(*call->spent[i], call->stream) != TN_OK) tn__error_restore(&error);
        call->spent[i]->value = 0;
    }
}

/* Tells the pool of the outputs' uses. To end their leases then tells it what it knows, for which
 * it needs no memory: of two outputs, the second can not fail when the first is valid already. */
static tn_status announce_outputs(const tn__op_call *call) {
    for (int i = 0; i < call->lease_count; i++) {
        const tn__op_lease_slot *slot = slot_at(call, i);
        if (slot->lease.value == 0 || !slot->is_output) continue;
        TN_TRY(announce(call, slot));
    }
    return TN_OK;
}

/* Outputs become valid only after all else that can fail has been done. */
static tn_status complete(tn__op_call *call) {
    TN_TRY(end_leases(call, 0));
    TN_TRY(destroy_all(call, call->scratch, &call->scratch_count));
    TN_TRY(announce_outputs(call));
    TN_TRY(end_leases(call, 1));
    destroy_spent(call);
    return TN_OK;
}

/* An output that no work can have touched is what it was. */
static tn_status give_up_lease(const tn__op_call *call, const tn__op_lease_slot *slot) {
    if (slot->is_held || slot->runs_before == call->runs) return tn__lease_undo(slot->lease);
    return tn_lease_abandon(slot->lease);
}

/* What can not be destroyed or dropped now ends with its scope. */
static void undo(tn__op_call *call) {
    for (int i = call->lease_count - 1; i >= 0; i--) {
        tn__op_lease_slot *slot = slot_at(call, i);
        if (slot->lease.value != 0 && give_up_lease(call, slot) == TN_OK) slot->lease.value = 0;
    }
    (void)destroy_all(call, call->scratch, &call->scratch_count);
    (void)destroy_all(call, call->saved, &call->saved_count);
    for (int i = call->lease_count - 1; i >= 0; i--) {
        const tn__op_lease_slot *slot = slot_at(call, i);
        if (!slot->is_derived) continue;
        if (tn_plane_drop(slot->tensor, slot->plane, call->stream) != TN_OK) return;
    }
    for (int i = call->derived_count - 1; i >= 0; i--) {
        const tn__op_derived *last = &call->derived[i];
        if (tn_plane_drop(last->tensor, last->plane, call->stream) != TN_OK) return;
    }
}

tn_status tn__op_finish(tn__op_call *call, tn_status status) {
    tn__saved_error failure;
    if (status == TN_OK) status = complete(call);
    if (status != TN_OK) {
        tn__error_save(&failure);
        undo(call);
        tn__error_restore(&failure);
    }
    tn__host_free(call->more_leases);
    return status;
}
