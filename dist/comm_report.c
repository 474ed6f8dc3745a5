/* tn_comm_report: what a communicator is, and the last of its collectives. */
#include "comm.h"

static void write_text(const tn_comm *comm, tn__text *out) {
    tn__text_add(out, "communicator %s: %s, rank %d of %d, %llu collectives put, %llu known done\n",
                 comm->name, comm->engine->name, comm->rank, comm->rank_count,
                 (unsigned long long)comm->flight.put, (unsigned long long)comm->flight.done);
    if (comm->failure != TN_OK) tn__text_add(out, "failed: %s\n", comm->failure_text.text);
    if (comm->graph_count)
        tn__text_add(out, "captured graphs: %llu\n", (unsigned long long)comm->graph_count);
    if (comm->windows.is_known)
        tn__text_add(out, "windows: %s\n",
                     comm->windows.status == TN_OK ? "used" : comm->windows.text.text);
    tn__flight_write_text(&comm->flight, out);
}

static void write_json(const tn_comm *comm, tn__text *out) {
    tn__text_add(out, "{\n  \"name\": ");
    tn__text_add_json(out, comm->name);
    tn__text_add(out,
                 ",\n  \"engine\": \"%s\",\n  \"rank\": %d,\n  \"rank_count\": %d,\n  \"put\": "
                 "%llu,\n  \"done\": %llu,\n  \"status\": \"%s\",\n  \"failure\": ",
                 comm->engine->name, comm->rank, comm->rank_count,
                 (unsigned long long)comm->flight.put, (unsigned long long)comm->flight.done,
                 tn_status_name(comm->failure));
    tn__text_add_json(out, comm->failure == TN_OK ? NULL : comm->failure_text.text);
    const int is_known = comm->windows.is_known, works = comm->windows.status == TN_OK;
    tn__text_add(out, ",\n  \"windows\": ");
    tn__text_add_json(out, !is_known ? NULL : works ? "used" : comm->windows.text.text);
    tn__text_add(out, ",\n  \"graphs\": %llu,\n  \"collectives\": [",
                 (unsigned long long)comm->graph_count);
    tn__flight_write_json(&comm->flight, out);
    tn__text_add(out, "]\n}\n");
}

size_t tn_comm_report(tn_comm *comm, tn_report_format format, char *text, size_t text_bytes) {
    if (!comm || (format != TN_REPORT_TEXT && format != TN_REPORT_JSON)) return 0;
    tn__text out = tn__text_begin(text, text_bytes);
    pthread_mutex_lock(&comm->lock);
    tn__comm_look_done_locked(comm);
    if (format == TN_REPORT_TEXT)
        write_text(comm, &out);
    else
        write_json(comm, &out);
    pthread_mutex_unlock(&comm->lock);
    return out.used;
}
