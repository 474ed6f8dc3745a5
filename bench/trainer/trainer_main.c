/* tenure-train: a small language model, trained with public calls only; see trainer_model.h.
 *
 * Exit status: 0 if every claim of the report holds, 1 if one does not or the job failed, 2 for
 * bad usage.
 */
#include <stdlib.h>
#include <string.h>

#include "trainer_options.h"
#include "trainer_report.h"

static int report_failure(const char *what, const char *why) {
    fprintf(stderr, "tenure-train: %s: %s\n", what, why);
    return 1;
}

typedef int (*writer)(const trainer_config *config, const trainer_result *result, FILE *stream);

static int write_trail(const trainer_config *config, const trainer_result *result, FILE *stream) {
    (void)config;
    return trainer_trail_print(&result->trail, stream);
}

/* 1 also if no such file is wanted. */
static int write_file(const char *path, writer write, const trainer_config *config,
                      const trainer_result *result) {
    if (!path) return 1;
    FILE *file = fopen(path, "w");
    int written = file && write(config, result, file);
    if (file && fclose(file) != 0) written = 0;
    if (!written) report_failure("can not be written", path);
    return written;
}

static int run_and_report(tn_device *device, const trainer_options *options) {
    trainer_result result = {.loss = NULL};
    char message[TRAINER_MESSAGE_BYTES];
    int all_hold = 0, failed = 0;
    if (!trainer_run(device, &options->config, &result, message)) {
        failed = report_failure("training", message);
    } else if (!trainer_report_print(&options->config, &result, stdout, &all_hold)) {
        failed = report_failure("output", "could not be written");
    } else {
        failed = !write_file(options->csv_path, trainer_report_csv, &options->config, &result) ||
                 !write_file(options->bytes_path, write_trail, &options->config, &result) ||
                 !all_hold;
    }
    trainer_result_free(&result);
    return failed;
}

static int train_on(tn_device *device, trainer_options *options) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    trainer_text text = {.bytes = NULL};
    char message[TRAINER_MESSAGE_BYTES];
    if (tn_device_info_get(device, &info) != TN_OK)
        return report_failure("the device", tn_error_last());
    if (!trainer_options_complete(options, &info)) return 2;
    /* One window and the byte after it must be held out. */
    const size_t least = (size_t)options->config.shape.sequence + 1;
    if (!trainer_text_read(options->texts, options->text_count, least, &text, message))
        return trainer_bad_usage("text", message);
    options->config.text = &text;
    trainer_report_heading(&options->config, &info, stdout);
    const int status = run_and_report(device, options);
    options->config.text = NULL;
    trainer_text_free(&text);
    return status;
}

int main(int argc, char **argv) {
    trainer_options options = {.driver = TN_DRIVER_AUTO};
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    const int end = trainer_options_parse(argc, argv, &options);
    if (end) return end - 1;
    config.driver = options.driver;
    if (tn_device_create(&config, &device) != TN_OK)
        return report_failure("the device", tn_error_last());
    int status = train_on(device, &options);
    if (tn_device_destroy(device) != TN_OK && status == 0)
        status = report_failure("closing the device", tn_error_last());
    return status;
}
