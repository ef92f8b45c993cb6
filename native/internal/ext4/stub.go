package ext4

import "gvx.dev/gvx/native/internal/blockdev"

// FS is an open volume.
type FS struct{}

// Inode is a reference-counted handle: exactly one exists per inode number in use.
type Inode struct{}

// Open reads the volume on dev. Errors name the reason (feature, state, damage).
func Open(dev blockdev.Device, o Options) (*FS, error) { return nil, errNotYet }

// Root is the root directory; the caller does not own a reference and needs none.
func (fs *FS) Root() *Inode { return nil }

// Statfs gives usage figures.
func (fs *FS) Statfs() Statfs { return Statfs{} }

// Sync writes all changed metadata to the device.
func (fs *FS) Sync() error { return errNotYet }

// Close frees orphans, syncs and marks the volume clean. Inodes are unusable afterwards.
func (fs *FS) Close() error { return errNotYet }

// ReadOnly tells whether writes are refused: asked for, by features, or after an error.
func (fs *FS) ReadOnly() bool { return true }

// BlockSize is the block size in bytes.
func (fs *FS) BlockSize() int64 { return 0 }

// Inode gives the inode of that number, with a reference.
func (fs *FS) Inode(ino uint32) (*Inode, error) { return nil, errNotYet }

// Rename moves odir/oname to ndir/nname; flags are Rename….
func (fs *FS) Rename(odir *Inode, oname string, ndir *Inode, nname string, flags uint32) error {
	return errNotYet
}

// CreateTmp makes a nameless inode (O_TMPFILE) with a reference; Link may name it.
func (fs *FS) CreateTmp(n New) (*Inode, error) { return nil, errNotYet }

// Ino is the inode number.
func (i *Inode) Ino() uint32 { return 0 }

// Generation is the inode's generation number.
func (i *Inode) Generation() uint32 { return 0 }

// IncRef takes a reference.
func (i *Inode) IncRef() {}

// DecRef drops a reference; the last one of an inode without links frees it.
func (i *Inode) DecRef() {}

// Attr gives the attributes.
func (i *Inode) Attr() Attr { return Attr{} }

// Size is Attr().Size, cheaper.
func (i *Inode) Size() int64 { return 0 }

// SetAttr changes attributes.
func (i *Inode) SetAttr(s SetAttr) error { return errNotYet }

// Touch sets the times in mask (SetAtime|SetMtime|SetCtime) to now.
func (i *Inode) Touch(mask uint32) error { return errNotYet }

// Lookup finds name and takes a reference; ENOENT.
func (i *Inode) Lookup(name string) (*Inode, error) { return nil, errNotYet }

// Create makes a file, directory, symlink, device, fifo or socket and returns it with a reference.
func (i *Inode) Create(name string, n New) (*Inode, error) { return nil, errNotYet }

// Link adds a name for target (not a directory).
func (i *Inode) Link(name string, target *Inode) error { return errNotYet }

// Unlink removes a name that is not a directory's.
func (i *Inode) Unlink(name string) error { return errNotYet }

// Rmdir removes an empty directory.
func (i *Inode) Rmdir(name string) error { return errNotYet }

// ReadDir calls fn for the entries after cookie (0: from the start) until it returns false.
// "." and ".." are not among them. fn must not call methods of this directory.
func (i *Inode) ReadDir(cookie int64, fn func(Dirent) bool) error { return errNotYet }

// Parent is the inode number of "..".
func (i *Inode) Parent() (uint32, error) { return 0, errNotYet }

// ReadAt reads up to len(p) bytes at off; n < len(p) with a nil error at the end of file.
func (i *Inode) ReadAt(p []byte, off int64) (int, error) { return 0, errNotYet }

// WriteAt writes p at off, growing the file; n < len(p) comes with an error (ENOSPC, EFBIG …).
// Times are not changed: call Touch.
func (i *Inode) WriteAt(p []byte, off int64) (int, error) { return 0, errNotYet }

// WriteFunc is WriteAt with the data copied by the caller: write(devOff, fileOff, n) is called
// for each contiguous piece and stores n bytes at devOff of the device. It returns the bytes done.
func (i *Inode) WriteFunc(off, n int64, write func(devOff, fileOff, n int64) error) (int64, error) {
	return 0, errNotYet
}

// Truncate sets the size. Times are not changed.
func (i *Inode) Truncate(size int64) error { return errNotYet }

// SetSize grows the size to at least size after in-place writes; it never shrinks.
func (i *Inode) SetSize(size int64) error { return errNotYet }

// Fallocate is fallocate(2).
func (i *Inode) Fallocate(mode uint32, off, n int64) error { return errNotYet }

// Extents tells where the bytes of [off, off+n) are on the device, in order and without gaps;
// off and n are rounded out to whole blocks. With alloc, holes and unwritten parts are allocated
// and zeroed first so that the range can be written or mapped in place (the size stays: SetSize).
func (i *Inode) Extents(off, n int64, alloc bool) ([]Extent, error) { return nil, errNotYet }

// SeekData is the first offset >= off with data; ENXIO when there is none.
func (i *Inode) SeekData(off int64) (int64, error) { return 0, errNotYet }

// SeekHole is the first offset >= off in a hole (the end of file counts as one); ENXIO past the end.
func (i *Inode) SeekHole(off int64) (int64, error) { return 0, errNotYet }

// Sync makes the inode durable as Options.Durable says.
func (i *Inode) Sync(dataOnly bool) error { return errNotYet }

// ReleaseWindow gives back space reserved in memory for further appends: call it when the last
// writable descriptor is closed.
func (i *Inode) ReleaseWindow() {}

// Readlink gives a symlink's target; EINVAL for others.
func (i *Inode) Readlink() (string, error) { return "", errNotYet }

// GetXattr gives the value of an extended attribute by its full name; ENODATA.
func (i *Inode) GetXattr(name string) ([]byte, error) { return nil, errNotYet }

// SetXattr sets an extended attribute; flags are Xattr….
func (i *Inode) SetXattr(name string, value []byte, flags int) error { return errNotYet }

// RemoveXattr removes an extended attribute; ENODATA.
func (i *Inode) RemoveXattr(name string) error { return errNotYet }

// ListXattr gives the full names.
func (i *Inode) ListXattr() ([]string, error) { return nil, errNotYet }
