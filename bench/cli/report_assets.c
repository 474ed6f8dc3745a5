/* Files as data: see report_assets.h. The build says where they are and looks after changes. */
#include "report_assets.h"

#define EMBED(symbol, path)                                                                        \
    __asm__(".section .rodata\n"                                                                   \
            ".global " #symbol "\n"                                                                \
            ".hidden " #symbol "\n" #symbol ":\n"                                                  \
            ".incbin \"" path "\"\n"                                                               \
            ".byte 0\n"                                                                            \
            ".previous\n")

EMBED(report_style, TENURE_REPORT_FOLDER "/report_style.css");
EMBED(report_script, TENURE_REPORT_FOLDER "/report_script.js");
