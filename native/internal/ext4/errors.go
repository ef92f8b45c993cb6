package ext4

import (
	"errors"
	"fmt"
	"syscall"
)

// corruptf is the error of a structure that cannot be right: EUCLEAN with what
// and where.
func corruptf(format string, args ...any) error {
	return fmt.Errorf("ext4: damaged volume: %s: %w", fmt.Sprintf(format, args...), syscall.EUCLEAN)
}

// isFatal tells errors after which nothing more may be written: the volume is
// damaged or the device failed, so the memory no longer matches the disk.
func isFatal(err error) bool {
	return errors.Is(err, syscall.EUCLEAN) || errors.Is(err, syscall.EIO)
}
