/* The norm of all gradients and the factor that clips it, with the same bits on the host and on
 * every GPU: see tn_square_sums and tn_clip_factor. */
#ifndef TENURE_EXACT_CLIP_H
#define TENURE_EXACT_CLIP_H

#include "exact_math.h"

enum {
    TN__SQUARE_BLOCKS = 256, /* sums that a call makes */
    TN__SQUARE_WIDTH = 1024  /* and those that each is added up of */
};

typedef struct tn__clip {
    float norm;
    float factor;
} tn__clip;

/* sums [TN__SQUARE_BLOCKS] */
TN__EXACT tn__clip tn__clip_of(const float *sums, float scale, float max_norm) {
    double total = 0.0;
    tn__clip clip;
    for (int i = 0; i < TN__SQUARE_BLOCKS; i++)
        total = total + (double)sums[i];
    clip.norm = (float)sqrt(total) * scale;
    clip.factor = clip.norm > max_norm ? scale * (max_norm / clip.norm) : scale;
    return clip;
}

#endif
