/* The style and the script of pages: report_style.css and report_script.js, with a 0 behind. */
#ifndef TENURE_REPORT_ASSETS_H
#define TENURE_REPORT_ASSETS_H

extern const char report_style[];
extern const char report_script[];

#endif
