package seam

import (
	"io/fs"
	"os"
	"syscall"
)

// ownedByUs tells whether the file belongs to the user this process runs as.
func ownedByUs(st fs.FileInfo) bool {
	s, ok := st.Sys().(*syscall.Stat_t)
	return ok && int(s.Uid) == os.Geteuid()
}
