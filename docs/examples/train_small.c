/* A framework of some 150 lines that trains a classifier with Tenure as its allocator.
 *
 *     cc -O2 train_small.c -o train_small $(pkg-config --cflags --libs tenure) -lm && ./train_small
 *
 * Its tensors are blocks of a pool, each with an owner that reports name; activations and gradients
 * are freed as soon as their last reader is through, weights live to the end. The loops here run on
 * the CPU, so the device is the host driver; on a GPU the same calls take a cudaStream_t, and what
 * tn_free is given must have been put on that stream before.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <tenure/tenure_pool.h>

enum { INPUTS = 16, HIDDEN = 64, CLASSES = 4, STEPS = 300, BATCH_MAX = 96 };

/* ---- the framework: tensors in a pool ------------------------------------------------------- */

typedef struct tensor {
    int rows, cols;
    float *at; /* rows x cols */
} tensor;

static tn_pool *pool;

static void check(tn_status status) {
    if (status == TN_OK) return;
    fprintf(stderr, "%s\n", tn_error_last()); /* of a shortage: the pool's report */
    exit(1);
}

static tensor tensor_create(int rows, int cols, const char *owner, tn_lifetime lifetime) {
    tensor made = {rows, cols, NULL};
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    options.owner = owner;
    options.lifetime = lifetime;
    check(tn_alloc(pool, sizeof(float) * (size_t)rows * (size_t)cols, NULL, &options,
                   (void **)&made.at));
    return made;
}

static void tensor_destroy(tensor *x) {
    check(tn_free(x->at, NULL));
    x->at = NULL;
}

static float random_number(void) { return (float)rand() / (float)RAND_MAX * 2 - 1; }

static tensor weight_create(int rows, int cols) {
    tensor made = tensor_create(rows, cols, "weights", TN_LIFETIME_PERSISTENT);
    for (int i = 0; i < rows * cols; i++)
        made.at[i] = random_number() / sqrtf((float)rows);
    return made;
}

/* out = a b, with either one transposed. */
static void multiply(tensor out, tensor a, int transpose_a, tensor b, int transpose_b) {
    int inner = transpose_a ? a.rows : a.cols;
    for (int i = 0; i < out.rows; i++) {
        for (int j = 0; j < out.cols; j++) {
            float sum = 0;
            for (int k = 0; k < inner; k++) {
                float left = transpose_a ? a.at[k * a.cols + i] : a.at[i * a.cols + k];
                sum += left * (transpose_b ? b.at[j * b.cols + k] : b.at[k * b.cols + j]);
            }
            out.at[i * out.cols + j] = sum;
        }
    }
}

/* ---- the model: softmax(relu(x w1) w2) ------------------------------------------------------ */

/* Which of the inputs' quarters has the largest sum. */
static int draw_example(float *inputs) {
    float sums[CLASSES] = {0};
    int best = 0;
    for (int i = 0; i < INPUTS; i++) {
        inputs[i] = random_number();
        sums[i * CLASSES / INPUTS] += inputs[i];
    }
    for (int i = 1; i < CLASSES; i++)
        if (sums[i] > sums[best]) best = i;
    return best;
}

/* Turns scores into their gradients; returns the mean loss. */
static float softmax_loss(tensor scores, const int *labels) {
    float loss = 0;
    for (int i = 0; i < scores.rows; i++) {
        float *row = scores.at + i * CLASSES, sum = 0;
        for (int j = 0; j < CLASSES; j++)
            sum += row[j] = expf(row[j]);
        loss -= logf(row[labels[i]] / sum) / (float)scores.rows;
        for (int j = 0; j < CLASSES; j++)
            row[j] = (row[j] / sum - (j == labels[i])) / (float)scores.rows;
    }
    return loss;
}

static void descend(tensor weight, tensor gradient) {
    for (int i = 0; i < weight.rows * weight.cols; i++)
        weight.at[i] -= 0.5F * gradient.at[i];
}

static float train_step(tensor w1, tensor w2, int batch) {
    tensor x = tensor_create(batch, INPUTS, "batch", TN_LIFETIME_STEP);
    tensor hidden = tensor_create(batch, HIDDEN, "activations", TN_LIFETIME_STEP);
    tensor scores = tensor_create(batch, CLASSES, "activations", TN_LIFETIME_STEP);
    tensor dhidden, dw1, dw2;
    int labels[BATCH_MAX];
    float loss;
    for (int i = 0; i < batch; i++)
        labels[i] = draw_example(x.at + i * INPUTS);
    multiply(hidden, x, 0, w1, 0);
    for (int i = 0; i < batch * HIDDEN; i++)
        hidden.at[i] = fmaxf(hidden.at[i], 0);
    multiply(scores, hidden, 0, w2, 0);
    loss = softmax_loss(scores, labels);

    dw2 = tensor_create(HIDDEN, CLASSES, "gradients", TN_LIFETIME_OP);
    multiply(dw2, hidden, 1, scores, 0);
    dhidden = tensor_create(batch, HIDDEN, "gradients", TN_LIFETIME_OP);
    multiply(dhidden, scores, 0, w2, 1);
    for (int i = 0; i < batch * HIDDEN; i++)
        dhidden.at[i] = hidden.at[i] > 0 ? dhidden.at[i] : 0;
    tensor_destroy(&scores);
    tensor_destroy(&hidden);
    dw1 = tensor_create(INPUTS, HIDDEN, "gradients", TN_LIFETIME_OP);
    multiply(dw1, x, 1, dhidden, 0);
    tensor_destroy(&dhidden);
    tensor_destroy(&x);
    descend(w1, dw1);
    descend(w2, dw2);
    tensor_destroy(&dw1);
    tensor_destroy(&dw2);
    return loss;
}

int main(void) {
    tn_device_config device_config = TN_DEVICE_CONFIG_INIT;
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    tn_device *device;
    tensor w1, w2;
    float first = 0, last = 0;
    device_config.driver = TN_DRIVER_HOST;
    pool_config.name = "train_small";
    check(tn_device_create(&device_config, &device));
    check(tn_pool_create(device, &pool_config, &pool));
    w1 = weight_create(INPUTS, HIDDEN);
    w2 = weight_create(HIDDEN, CLASSES);
    for (int step = 0; step < STEPS; step++) {
        float loss = train_step(w1, w2, 32 + step % 5 * 16);
        first += step < 20 ? loss / 20 : 0;
        last += step >= STEPS - 20 ? loss / 20 : 0;
    }
    check(tn_pool_stats_get(pool, &stats));
    printf("loss %.3f, then %.3f; peak live %zu bytes, %llu allocations, live %zu bytes\n",
           (double)first, (double)last, stats.peak_live_bytes, (unsigned long long)stats.allocs,
           stats.live_bytes);
    tensor_destroy(&w1);
    tensor_destroy(&w2);
    check(tn_pool_destroy(pool)); /* names whoever still holds a block */
    check(tn_device_destroy(device));
    return last < first / 2 ? 0 : 1;
}
