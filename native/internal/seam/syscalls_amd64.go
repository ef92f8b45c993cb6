package seam

import "golang.org/x/sys/unix"

// restartOldOpens is RestartOpens for the system calls that newer architectures do not have.
func restartOldOpens() error {
	if err := wrapSyscall(unix.SYS_OPEN, "open", restarting); err != nil {
		return err
	}
	return wrapSyscall(unix.SYS_CREAT, "creat", restarting)
}
