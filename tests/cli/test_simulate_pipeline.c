/* The pipeline of a simulation: turns, chunks, and when pieces start. */
#include "test_support.h"

#include <stdlib.h>

#include "simulate_pipeline.h"

enum { STAGES_MAX = 8 };

static simulate_model model_of(int64_t pp, int64_t vpp, int64_t layers, int64_t microbatches) {
    simulate_model model = {.pp = pp, .vpp = vpp, .layers = layers};
    model.microbatches = microbatches;
    return model;
}

static void expect_turn(const simulate_model *model, int stage, int index, int chunk,
                        int microbatch, int is_backward) {
    const simulate_turn turn = simulate_turn_of(model, stage, index);
    assert_int_equal(turn.chunk, chunk);
    assert_int_equal(turn.microbatch, microbatch);
    assert_int_equal(turn.is_backward, is_backward);
}

static void a_stage_takes_turns_after_it_has_filled_the_pipeline(void **state) {
    const simulate_model model = model_of(3, 1, 3, 4);
    (void)state;
    assert_int_equal(simulate_turn_count(&model), 8);
    expect_turn(&model, 0, 0, 0, 0, 0);
    expect_turn(&model, 0, 1, 0, 1, 0);
    expect_turn(&model, 0, 2, 0, 2, 0);
    expect_turn(&model, 0, 3, 0, 0, 1);
    expect_turn(&model, 0, 4, 0, 3, 0);
    expect_turn(&model, 0, 7, 0, 3, 1);
    expect_turn(&model, 2, 0, 2, 0, 0);
    expect_turn(&model, 2, 1, 2, 0, 1);
}

static void chunks_have_all_layers_once_and_in_order(void **state) {
    const simulate_model model = model_of(8, 4, 61, 8);
    int64_t next = 0, first, count;
    (void)state;
    for (int chunk = 0; chunk < simulate_chunk_count(&model); chunk++) {
        simulate_chunk_layers(&model, chunk, &first, &count);
        assert_int_equal(first, next);
        assert_true(count == 1 || count == 2);
        next += count;
    }
    assert_int_equal(next, 61);
}

/* Each piece of a stage's chunks once, a backward after its forward. */
static void every_stage_does_every_piece_once(void **state) {
    static const int64_t shapes[][3] = {{1, 1, 3}, {4, 1, 2}, {4, 1, 8}, {2, 2, 4}, {8, 4, 16}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const simulate_model model = model_of(shapes[s][0], shapes[s][1], 64, shapes[s][2]);
        for (int stage = 0; stage < model.pp; stage++) {
            int seen[64][16] = {{0}};
            for (int i = 0; i < simulate_turn_count(&model); i++) {
                const simulate_turn turn = simulate_turn_of(&model, stage, i);
                assert_int_equal(turn.chunk % model.pp, stage);
                assert_int_equal(seen[turn.chunk][turn.microbatch], turn.is_backward);
                seen[turn.chunk][turn.microbatch]++;
            }
            for (int chunk = stage; chunk < simulate_chunk_count(&model); chunk += (int)model.pp)
                for (int m = 0; m < model.microbatches; m++)
                    assert_int_equal(seen[chunk][m], 2);
        }
    }
}

/* Records of pieces that each take as long: forward 1, backward 2. */
static void fill_records(const simulate_model *model, simulate_record *records,
                         simulate_record **list) {
    for (int stage = 0; stage < model->pp; stage++) {
        simulate_record_begin(&records[stage]);
        for (int i = 0; i < simulate_turn_count(model); i++) {
            const simulate_turn turn = simulate_turn_of(model, stage, i);
            records[stage].last_us += turn.is_backward ? 2.0 : 1.0;
            simulate_record_piece(&records[stage], turn.chunk, turn.microbatch, turn.is_backward);
        }
        list[stage] = &records[stage];
    }
}

static void free_records(const simulate_model *model, simulate_record *records) {
    for (int stage = 0; stage < model->pp; stage++)
        simulate_record_end(&records[stage]);
}

/* 1F1B of p stages and m micro-batches takes (m + p - 1) times a forward and a backward. */
static void the_pipeline_takes_its_closed_form(void **state) {
    static const int64_t shapes[][2] = {{1, 4}, {2, 4}, {4, 4}, {4, 9}, {8, 16}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const simulate_model model = model_of(shapes[s][0], 1, 64, shapes[s][1]);
        simulate_record records[STAGES_MAX], *list[STAGES_MAX];
        fill_records(&model, records, list);
        const double end_us = simulate_pipeline_start(&model, list);
        assert_true(end_us == (double)(shapes[s][1] + shapes[s][0] - 1) * 3.0);
        assert_true(records[0].pieces[0].start_us == 0.0);
        free_records(&model, records);
    }
}

/* Interleaved, v chunks fill the pipeline in a v-th of the time. */
static void interleaved_chunks_fill_it_sooner(void **state) {
    const simulate_model model = model_of(4, 2, 64, 8);
    simulate_record records[STAGES_MAX], *list[STAGES_MAX];
    (void)state;
    fill_records(&model, records, list);
    assert_true(simulate_pipeline_start(&model, list) == (2.0 * 8 + 4 - 1) * 3.0);
    records[1].pieces[3].microbatch++; /* not what its turn says */
    assert_true(simulate_pipeline_start(&model, list) < 0.0);
    free_records(&model, records);
}

/* Exposed is what is sent while nothing is computed. */
static void what_computation_hides_is_not_exposed(void **state) {
    static const tnsim_interval intervals[] = {{7, 0, "gemm", 0.0, 10.0},
                                               {9, 0, "all_gather", 5.0, 12.0},
                                               {7, 0, "gemm", 15.0, 20.0},
                                               {9, 0, "reduce_scatter", 14.0, 15.5},
                                               {9, 0, "all_gather", 30.0, 31.0}};
    simulate_record record;
    (void)state;
    simulate_record_begin(&record);
    for (size_t i = 0; i < sizeof intervals / sizeof *intervals; i++)
        simulate_record_watch(&record, &intervals[i]);
    simulate_record_close(&record);
    assert_true(record.compute_us == 15.0);
    assert_true(record.communication_us == 7.0 + 1.5 + 1.0);
    assert_true(record.exposed_us == 2.0 + 1.0 + 1.0);
    assert_int_equal(record.stream_count, 2);
    assert_true(record.is_complete);
    simulate_record_end(&record);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stage_takes_turns_after_it_has_filled_the_pipeline),
        cmocka_unit_test(chunks_have_all_layers_once_and_in_order),
        cmocka_unit_test(every_stage_does_every_piece_once),
        cmocka_unit_test(the_pipeline_takes_its_closed_form),
        cmocka_unit_test(interleaved_chunks_fill_it_sooner),
        cmocka_unit_test(what_computation_hides_is_not_exposed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
