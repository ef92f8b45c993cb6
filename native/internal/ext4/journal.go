package ext4

import "syscall"

// A handle brackets one change of the file system: every metadata block it
// touches is obtained from it. Today that only keeps Sync out while the change
// is half done; a JBD2 transaction slots in here.
//
// begin is called before any inode lock is taken and never nested.
type handle struct {
	fs *FS
}

// begin starts a change; EROFS when the volume may not be written.
func (fs *FS) begin() (*handle, error) {
	if fs.readOnly.Load() {
		return nil, syscall.EROFS
	}
	if fs.bufs.dirtyBytes() > fs.dirtyLimit {
		if err := fs.Sync(); err != nil {
			return nil, err
		}
	}
	fs.barrier.RLock()
	if fs.readOnly.Load() { // Sync or another handle failed meanwhile
		fs.barrier.RUnlock()
		return nil, syscall.EROFS
	}
	return &handle{fs: fs}, nil
}

// end finishes the change. A fatal error makes the volume read-only, because
// what is in memory can no longer be trusted.
func (h *handle) end(err error) {
	if err != nil && isFatal(err) {
		h.fs.abort(err)
	}
	h.fs.barrier.RUnlock()
}

// write gives a metadata block for changing.
func (h *handle) write(blk uint64) (*buffer, error) { return h.fs.bufs.write(blk) }

// create gives a zeroed metadata block that is written whole.
func (h *handle) create(blk uint64) *buffer { return h.fs.bufs.create(blk) }

// abort refuses further writes for good.
func (fs *FS) abort(err error) {
	fs.failMu.Lock()
	if fs.failure == nil {
		fs.failure = err
	}
	fs.failMu.Unlock()
	fs.readOnly.Store(true)
}
