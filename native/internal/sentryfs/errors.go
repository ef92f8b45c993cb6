package sentryfs

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/log"
)

// toErr makes an error of ext4 one that the Sentry's system calls understand. Errors without an errno are EIO, and so is
// damage (EUCLEAN); both are logged, since the guest cannot see what happened.
func toErr(err error) error {
	if err == nil {
		return nil
	}
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		log.Warningf("ext4: %v", err)
		return linuxerr.EIO
	}
	if errno == syscall.EIO || errno == syscall.EUCLEAN {
		log.Warningf("ext4: %v", err)
	}
	return linuxerr.ErrorFromUnix(unix.Errno(errno))
}

// isErrno tells whether err is or wraps errno.
func isErrno(err error, errno syscall.Errno) bool {
	var e syscall.Errno
	return errors.As(err, &e) && e == errno
}
