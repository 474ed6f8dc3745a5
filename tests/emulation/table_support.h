/* Files of GEMM choices as another machine, or another version, would have written them. */
#ifndef TENURE_TABLE_SUPPORT_H
#define TENURE_TABLE_SUPPORT_H

/* Puts `to` in the place of the first `from` in the file, and makes all sums right again. */
void table_edit(const char *path, const char *from, const char *to);

#endif
