package seam

import (
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/sentry/arch"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/limits"
)

// AllocateModes is implemented by file descriptions whose Allocate understands more modes than 0.
type AllocateModes interface {
	// AllocateModes is the set of FALLOC_FL_ flags that Allocate understands.
	AllocateModes() uint64
}

// EnableFallocateModes lets fallocate(2) have modes other than 0 (holes punched, ranges zeroed, sizes kept) on files that implement
// AllocateModes; the stock system call refuses them on every file. Call it before the guest runs.
func EnableFallocateModes() error {
	return wrapSyscall(unix.SYS_FALLOCATE, "fallocate", func(stock kernel.SyscallFn) kernel.SyscallFn {
		return func(t *kernel.Task, sysno uintptr, args arch.SyscallArguments) (uintptr, *kernel.SyscallControl, error) {
			if args[1].Uint64() == 0 {
				return stock(t, sysno, args)
			}
			return 0, nil, fallocate(t, args)
		}
	})
}

// fallocate is fallocate(2) with a mode.
func fallocate(t *kernel.Task, args arch.SyscallArguments) error {
	mode, offset, length := uint64(args[1].Uint()), args[2].Int64(), args[3].Int64()
	file := t.GetFile(args[0].Int())
	if file == nil {
		return linuxerr.EBADF
	}
	defer file.DecRef(t)
	if !file.IsWritable() {
		return linuxerr.EBADF
	}
	modes, ok := file.Impl().(AllocateModes)
	if !ok || mode&^modes.AllocateModes() != 0 {
		return linuxerr.EOPNOTSUPP
	}
	if offset < 0 || length <= 0 {
		return linuxerr.EINVAL
	}
	end := offset + length
	if end < 0 {
		return linuxerr.EFBIG
	}
	if mode&unix.FALLOC_FL_KEEP_SIZE == 0 && uint64(end) >= limits.FromContext(t).Get(limits.FileSize).Cur {
		t.SendSignal(&linux.SignalInfo{Signo: int32(linux.SIGXFSZ), Code: linux.SI_USER})
		return linuxerr.EFBIG
	}
	return file.Allocate(t, mode, uint64(offset), uint64(length))
}
