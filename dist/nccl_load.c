/* NCCL's library: loading it and finding its symbols; and an id for its communicators.
 *
 * The library is local to us (RTLD_LOCAL) and once loaded it stays: it may have threads.
 */
#include "nccl_load.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "options.h"

#ifndef TENURE_WITH_NCCL
#define TENURE_WITH_NCCL 0
#endif

typedef struct symbol_row {
    size_t offset;
    const char *name;
} symbol_row;

#define AS_ROW(field, name, result, parameters) {offsetof(tn__nccl_calls, field), name},
static const symbol_row symbols[] = {TN__NCCL_CALLS(AS_ROW)};
static const symbol_row later_symbols[] = {TN__NCCL_LATER_CALLS(AS_ROW)};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tn__nccl_calls loaded;
static int is_loaded;

/* ---- errors --------------------------------------------------------------------------------- */

static const char *result_name(int code) {
    static const char *const names[] = {TN__NCCL_RESULT_NAMES};
    unsigned at = (unsigned)code;
    return at < sizeof names / sizeof *names ? names[at] : "unknown NCCL result";
}

tn_status tn__nccl_fail(const tn__nccl_calls *calls, void *comm, int code, const char *call) {
    const char *text = calls->error_string(code);
    const char *detail = calls->last_error(comm);
    tn_status status = code == TN__NCCL_INVALID_ARGUMENT ? TN_INVALID_ARGUMENT : TN_COMM_ERROR;
    return TN_FAIL_NATIVE(status, code, "%s failed: %s (%s)%s%s", call, result_name(code),
                          text ? text : "no text", detail && *detail ? ": " : "",
                          detail ? detail : "");
}

/* ---- loading -------------------------------------------------------------------------------- */

static void set_symbol(tn__nccl_calls *out, const symbol_row *row, void *address) {
    memcpy((char *)out + row->offset, &address, sizeof address);
}

static tn_status find_symbols(void *library, const char *path, tn__nccl_calls *out) {
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *address = dlsym(library, symbols[i].name);
        if (!address) {
            return TN_FAIL(
                TN_UNSUPPORTED,
                "%s is no NCCL that can be used: it lacks %s (NCCL 2.14 or later has it)", path,
                symbols[i].name);
        }
        set_symbol(out, &symbols[i], address);
    }
    for (size_t i = 0; i < sizeof later_symbols / sizeof *later_symbols; i++)
        set_symbol(out, &later_symbols[i], dlsym(library, later_symbols[i].name));
    *(void **)&out->host_tasks = dlsym(library, TN__NCCL_HOST_TASKS);
    return TN_OK;
}

static tn_status load(tn__nccl_calls *out) {
    if (!TENURE_WITH_NCCL) {
        return TN_FAIL(TN_UNSUPPORTED, "this libtenure-dist was built without NCCL: build it with "
                                       "TENURE_NCCL=AUTO or ON");
    }
    const char *path = tn__options_get()->nccl_library;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        return TN_FAIL(TN_UNSUPPORTED,
                       "no NCCL: %s; install libnccl2 or name the library in TENURE_NCCL_LIBRARY",
                       reason ? reason : path);
    }
    tn_status status = find_symbols(library, path, out);
    if (status != TN_OK) dlclose(library);
    return status;
}

tn_status tn__nccl_load(const tn__nccl_calls **out) {
    tn_status status = TN_OK;
    pthread_mutex_lock(&lock);
    if (!is_loaded) status = load(&loaded);
    is_loaded |= status == TN_OK;
    if (status == TN_OK) *out = &loaded;
    pthread_mutex_unlock(&lock);
    return status;
}

int tn__nccl_is_for_host(void) {
    const tn__nccl_calls *calls;
    tn__saved_error saved;
    tn__error_save(&saved);
    int is_for_host = tn__nccl_load(&calls) == TN_OK && calls->host_tasks;
    tn__error_restore(&saved);
    return is_for_host;
}

/* ---- ids ------------------------------------------------------------------------------------ */

tn_status tn_comm_id_create(tn_comm_id *out) {
    TN_REQUIRE(out, "tn_comm_id_create: out is NULL");
    _Static_assert(sizeof(tn_comm_id) == sizeof(tn__nccl_id), "a public id holds NCCL's");
    const tn__nccl_calls *calls;
    tn__nccl_id id;
    TN_TRY(tn__nccl_load(&calls));
    int code = calls->id(&id);
    if (code != TN__NCCL_SUCCESS) return tn__nccl_fail(calls, NULL, code, "ncclGetUniqueId");
    memcpy(out, &id, sizeof id);
    return TN_OK;
}
