package seccomp

// Arch is AUDIT_ARCH_AARCH64, the only instruction set the filter answers for.
const Arch = 0xc00000b7

// arm64 never had the older names.
var allowedArch, refusedArch []int
