package seam

import (
	"fmt"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/sentry/arch"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
)

// wrapSyscall puts what wrap returns in place of a system call of the guest's, which wrap gets. Call it before the guest runs.
func wrapSyscall(number uintptr, name string, wrap func(stock kernel.SyscallFn) kernel.SyscallFn) error {
	table, ok := kernel.LookupSyscallTable(abi.Linux, arch.Host)
	if !ok {
		return fmt.Errorf("%w: no system call table of this machine's architecture is registered", ErrLayout)
	}
	entry, ok := table.Table[number]
	if !ok || entry.Name != name {
		return fmt.Errorf("%w: the system call table has no %s", ErrLayout, name)
	}
	entry.Fn = wrap(entry.Fn)
	table.Table[number] = entry
	table.Init() // copies the table to where the dispatcher looks
	return nil
}

// RestartOpens makes an open that waits for the other end of a FIFO go on after a signal whose handler has SA_RESTART, as Linux does
// (fifo_open returns -ERESTARTSYS). The stock Sentry says EINTR whatever the handler is, and Go programs, which get SIGURG at any moment,
// do not expect it: runc's init waits so for `runc start`, and containers failed now and then with "open exec fifo: interrupted system call".
func RestartOpens() error {
	for _, call := range []struct {
		number uintptr
		name   string
	}{{unix.SYS_OPENAT, "openat"}, {unix.SYS_OPENAT2, "openat2"}} {
		if err := wrapSyscall(call.number, call.name, restarting); err != nil {
			return err
		}
	}
	return restartOldOpens()
}

// restarting turns EINTR into the error with which the Sentry restarts a system call where the signal's handler allows it, and says
// EINTR where not.
func restarting(stock kernel.SyscallFn) kernel.SyscallFn {
	return func(t *kernel.Task, sysno uintptr, args arch.SyscallArguments) (uintptr, *kernel.SyscallControl, error) {
		value, control, err := stock(t, sysno, args)
		if linuxerr.Equals(linuxerr.EINTR, err) {
			err = linuxerr.ERESTARTSYS
		}
		return value, control, err
	}
}
