// The kernels for avx2.
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <math.h>
#include <stdint.h>
#include <string.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

#define TL_ISA avx2
#define TL_ISA_NAME "avx2"
#define TL_PRIMITIVES "primitives_avx2.inc.h"
#include "kernels.inc.h"
#pragma GCC pop_options

namespace tl {

const Kernels* avx2_kernels() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2")
         && __builtin_cpu_supports("fma")
         && __builtin_cpu_supports("f16c") ? &avx2::kKernels : nullptr;
}

}  // namespace tl

#else

namespace tl {

const Kernels* avx2_kernels() { return nullptr; }

}  // namespace tl

#endif
