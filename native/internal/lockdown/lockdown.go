// Package lockdown takes away from a process what it will never need. Everything here is one-way and inherited: a
// child cannot get back what its parent gave up.
//
// The order in the supervisor: Process first thing (before any thread but the runtime's own does work), then sockets and files
// are opened, then the Sentry is started. The Sentry installs gVisor's seccomp filter itself before guest code runs. Room is left
// for a seccomp filter and a Landlock domain of the supervisor: both belong at the end of Process's list, after
// no_new_privs, which they require.
package lockdown

import (
	"errors"
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Process gives up privileges of the whole process: no_new_privs (so that no set-user-ID program or file capability
// works in any descendant), every capability, core dumps (a guest's memory must not land in a file), and it raises the soft limit of
// open files to the hard one (each guest file or connection may cost a descriptor).
func Process() error {
	// All of it is per thread in the kernel; AllThreadsSyscall applies it to those that exist, later ones inherit.
	if err := allThreads("no_new_privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0); err != nil {
		return err
	}
	if err := dropCapabilities(); err != nil {
		return err
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("lockdown: RLIMIT_CORE: %w", err)
	}
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return fmt.Errorf("lockdown: RLIMIT_NOFILE: %w", err)
	}
	files.Cur = files.Max
	// syscall's and not unix's: the Go runtime remembers a value set through it, and would restore the old one at exec.
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: files.Cur, Max: files.Max}); err != nil {
		return fmt.Errorf("lockdown: RLIMIT_NOFILE: %w", err)
	}
	return nil
}

// dropCapabilities empties all capability sets. The bounding set can only be shrunk by who holds CAP_SETPCAP; for
// others no_new_privs makes it irrelevant.
func dropCapabilities() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("lockdown: reading capabilities: %w", err)
	}
	if data[0].Effective&(1<<unix.CAP_SETPCAP) != 0 {
		for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
			err := allThreads("bounding set", unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0)
			if err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: an older kernel that lacks this one.
				return err
			}
		}
	}
	if data == ([2]unix.CapUserData{}) {
		return nil
	}
	if err := allThreads("ambient set", unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0); err != nil {
		return err
	}
	hdr.Pid = 0
	data = [2]unix.CapUserData{}
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&hdr)), uintptr(unsafe.Pointer(&data[0])), 0)
	if errno != 0 {
		return fmt.Errorf("lockdown: dropping capabilities: %w", errno)
	}
	return nil
}

func allThreads(what string, trap, a1, a2, a3 uintptr) error {
	// Also for the sake of the Sentry, whose systrap stubs do not survive in a binary with cgo's runtime.
	const builtWithCgo = syscall.ENOTSUP
	// prctl checks that unused arguments are zero: the six-argument form passes them.
	_, _, errno := syscall.AllThreadsSyscall6(trap, a1, a2, a3, 0, 0, 0)
	if errno == builtWithCgo {
		return errors.New("lockdown: this binary was built with cgo; gvx-sentry must be built with CGO_ENABLED=0")
	}
	if errno != 0 {
		return fmt.Errorf("lockdown: %s: %w", what, errno)
	}
	return nil
}
