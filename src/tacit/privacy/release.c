/* Two passes over every number of a release, each of which torch makes in several: from random words to uniforms, and from
   a sum and its noise to the grid.

   Every operation here is one that IEEE 754 rounds correctly (or is exact), in the order in which torch does it, so that
   what comes out has the same bits: `_kernels.py` names the lines of torch that each function replaces. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef ptrdiff_t size;

/* In place, of `count` words w each: ((w >> 11) + 1) 2^-53, a double in (0, 1]. All of it is exact. */
void tacit_uniforms(unsigned char *words, size count) {
    for (size i = 0; i < count; i++) {
        uint64_t word;
        memcpy(&word, words + 8 * i, sizeof word);
        const double value = (double)(int64_t)((word >> 11) + 1) * 0x1p-53;
        memcpy(words + 8 * i, &value, sizeof value);
    }
}

/* out = (round(value / step) + round(noise * ratio)) * step, where `inverse` = 1 / step and step is a power of two; a
   value that is not finite on the grid counts as zero, and zero has one sign. */
void tacit_grid_add(const double *restrict value, const double *restrict noise, size count, double inverse, double ratio,
                    double step, double *restrict out) {
    for (size i = 0; i < count; i++) {
        double own = rint(value[i] * inverse);
        own = fabs(own) < INFINITY ? own : 0.0;
        out[i] = 0.0 + (rint(noise[i] * ratio) + own) * step;
    }
}
