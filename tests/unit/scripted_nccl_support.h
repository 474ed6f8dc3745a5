/* Opens the scripted NCCL (tests/dist/scripted_nccl.h) as the NCCL engine's library. */
#ifndef TENURE_SCRIPTED_NCCL_SUPPORT_H
#define TENURE_SCRIPTED_NCCL_SUPPORT_H

#include "../dist/scripted_nccl.h"
#include "comm_engine.h"

/* Before any test, of a build folder: 0, or what main is to return, and why is said. */
int scripted_nccl_open(const char *build, scripted_nccl **script, const tn__comm_engine **engine);

#endif
