// The kernels in the compiler's own vectors: correct on every machine.
#define TL_ISA portable
#define TL_ISA_NAME "portable"
#define TL_PRIMITIVES "primitives_portable.inc.h"
#include "kernels.inc.h"

namespace tl {

const Kernels& portable_kernels() { return portable::kKernels; }

}  // namespace tl
