// The kernels for avx512-vnni.
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <math.h>
#include <stdint.h>
#include <string.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#include <immintrin.h>

#define TL_ISA avx512
#define TL_ISA_NAME "avx512-vnni"
#define TL_MANY_REGISTERS
#define TL_PRIMITIVES "primitives_avx512.inc.h"
#include "kernels.inc.h"
#pragma GCC pop_options

namespace tl {

const Kernels* avx512_kernels() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f")
         && __builtin_cpu_supports("avx512bw")
         && __builtin_cpu_supports("avx512vl")
         && __builtin_cpu_supports("avx512dq")
         && __builtin_cpu_supports("avx512vnni") ? &avx512::kKernels : nullptr;
}

}  // namespace tl

#else

namespace tl {

const Kernels* avx512_kernels() { return nullptr; }

}  // namespace tl

#endif
