package sentryfs

import (
	"errors"
	"io"
	"math"
	"sync"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/safemem"
	"gvisor.dev/gvisor/pkg/sentry/hostfd"
	"gvisor.dev/gvisor/pkg/sentry/memmap"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/pkg/usermem"

	"gvx.dev/gvx/native/internal/ext4"
)

// regularFileFD is an open regular file.
type regularFileFD struct {
	fileDescription

	// offMu serializes operations that use or change off.
	offMu sync.Mutex
	off   int64
}

// openRegular opens d, a regular file; fresh as in open.
func (d *dentry) openRegular(ctx context.Context, rp *vfs.ResolvingPath, opts *vfs.OpenOptions, fresh bool) (*vfs.FileDescription, error) {
	i, mnt := d.inode, rp.Mount()
	if vfs.MayWriteFileWithOpenFlags(opts.Flags) && i.fs.vol.FS.ReadOnly() {
		return nil, linuxerr.EROFS
	}
	fd := &regularFileFD{}
	fd.LockFD.Init(&i.locks)
	if err := fd.vfsfd.Init(fd, opts.Flags, rp.Credentials(), mnt, &d.vfsd, &vfs.FileDescriptionOptions{AllowDirectIO: true}); err != nil {
		return nil, err
	}
	if fd.vfsfd.IsWritable() {
		i.writers.Add(1)
	}
	if !fresh && opts.Flags&linux.O_TRUNC != 0 {
		err := fd.modify(func() error { return i.truncate(ctx, 0) })
		if err != nil {
			fd.vfsfd.DecRef(ctx)
			return nil, err
		}
	}
	return &fd.vfsfd, nil
}

// Release implements vfs.FileDescriptionImpl.Release.
func (fd *regularFileFD) Release(context.Context) {
	if i := fd.inode(); fd.vfsfd.IsWritable() && i.writers.Add(-1) == 0 {
		i.ei.ReleaseWindow()
	}
}

// PRead implements vfs.FileDescriptionImpl.PRead.
func (fd *regularFileFD) PRead(ctx context.Context, dst usermem.IOSequence, offset int64, opts vfs.ReadOptions) (int64, error) {
	if offset < 0 {
		return 0, linuxerr.EINVAL
	}
	if opts.Flags&^(linux.RWF_HIPRI|linux.RWF_DSYNC|linux.RWF_SYNC) != 0 {
		return 0, linuxerr.EOPNOTSUPP
	}
	if dst.NumBytes() == 0 {
		return 0, nil
	}
	i := fd.inode()
	n, err := dst.CopyOutFrom(ctx, &fileReader{i: i, off: offset})
	i.touchAtime(ctx, fd.vfsfd.Mount())
	return n, err
}

// Read implements vfs.FileDescriptionImpl.Read.
func (fd *regularFileFD) Read(ctx context.Context, dst usermem.IOSequence, opts vfs.ReadOptions) (int64, error) {
	fd.offMu.Lock()
	defer fd.offMu.Unlock()
	n, err := fd.PRead(ctx, dst, fd.off, opts)
	fd.off += n
	return n, err
}

// fileReader implements safemem.Reader on the contents of an inode.
type fileReader struct {
	i   *inode
	off int64
}

// ReadToBlocks implements safemem.Reader.ReadToBlocks: the host kernel copies from the image's page cache to dsts.
func (r *fileReader) ReadToBlocks(dsts safemem.BlockSeq) (uint64, error) {
	i := r.i
	i.dataMu.RLock()
	defer i.dataMu.RUnlock()
	size := i.ei.Size()
	if r.off >= size {
		return 0, io.EOF
	}
	want := min(size-r.off, int64(min(dsts.NumBytes(), math.MaxInt64)))
	dsts = dsts.TakeFirst64(uint64(want))
	if i.fs.vol.Dev.FD() < 0 {
		return r.readBuffered(dsts)
	}
	extents, err := i.ei.Extents(r.off, want, false)
	if err != nil {
		return 0, toErr(err)
	}
	var done uint64
	for _, e := range extents {
		skip := r.off - e.FileOff
		if skip < 0 || skip >= e.Len {
			continue
		}
		for n := uint64(e.Len - skip); n > 0 && !dsts.IsEmpty(); {
			dst := dsts.TakeFirst64(n)
			var got uint64
			fd, devOff := -1, e.DevOff+r.off-e.FileOff
			if !e.Hole {
				var count int64
				fd, count = i.fs.source(devOff, int64(dst.NumBytes()))
				dst = dst.TakeFirst64(uint64(count))
			}
			if fd < 0 {
				got, err = safemem.ZeroSeq(dst)
			} else {
				got, err = hostfd.Preadv2(int32(fd), dst, devOff, 0)
			}
			done += got
			n -= got
			r.off += int64(got)
			dsts = dsts.DropFirst64(got)
			if err != nil {
				if errors.Is(err, io.EOF) {
					err = linuxerr.EIO // the image is shorter than the volume
				}
				return done, err
			}
		}
	}
	return done, nil
}

// readBuffered reads through ext4, for devices without a descriptor.
func (r *fileReader) readBuffered(dsts safemem.BlockSeq) (uint64, error) {
	buf := make([]byte, min(dsts.NumBytes(), 1<<20))
	var done uint64
	for !dsts.IsEmpty() {
		n, err := r.i.ei.ReadAt(buf[:min(uint64(len(buf)), dsts.NumBytes())], r.off)
		copied, cerr := safemem.CopySeq(dsts, safemem.BlockSeqOf(safemem.BlockFromSafeSlice(buf[:n])))
		done += copied
		r.off += int64(copied)
		dsts = dsts.DropFirst64(copied)
		if err != nil {
			return done, toErr(err)
		}
		if cerr != nil || n == 0 {
			return done, cerr
		}
	}
	return done, nil
}

// PWrite implements vfs.FileDescriptionImpl.PWrite.
func (fd *regularFileFD) PWrite(ctx context.Context, src usermem.IOSequence, offset int64, opts vfs.WriteOptions) (int64, error) {
	n, _, err := fd.pwrite(ctx, src, offset, opts)
	return n, err
}

// Write implements vfs.FileDescriptionImpl.Write.
func (fd *regularFileFD) Write(ctx context.Context, src usermem.IOSequence, opts vfs.WriteOptions) (int64, error) {
	fd.offMu.Lock()
	defer fd.offMu.Unlock()
	n, off, err := fd.pwrite(ctx, src, fd.off, opts)
	fd.off = off
	return n, err
}

// pwrite writes at offset, or at the end of file with O_APPEND, and returns the bytes written and the offset after them.
func (fd *regularFileFD) pwrite(ctx context.Context, src usermem.IOSequence, offset int64, opts vfs.WriteOptions) (written, end int64, err error) {
	if offset < 0 {
		return 0, offset, linuxerr.EINVAL
	}
	if opts.Flags&^(linux.RWF_HIPRI|linux.RWF_DSYNC|linux.RWF_SYNC) != 0 {
		return 0, offset, linuxerr.EOPNOTSUPP
	}
	n := src.NumBytes()
	if n == 0 {
		return 0, offset, nil
	}
	i := fd.inode()
	i.mu.Lock()
	flags := fd.vfsfd.StatusFlags()
	if flags&linux.O_APPEND != 0 {
		offset = i.ei.Size()
	}
	written, err = i.writeLocked(ctx, src, offset)
	i.mu.Unlock()
	if written > 0 && (flags&linux.O_DSYNC != 0 || opts.Flags&(linux.RWF_DSYNC|linux.RWF_SYNC) != 0) {
		if serr := i.ei.Sync(flags&linux.O_SYNC == 0 && opts.Flags&linux.RWF_SYNC == 0); serr != nil && err == nil {
			err = toErr(serr)
		}
	}
	return written, offset + written, err
}

// writeLocked writes src at offset. i.mu is held.
func (i *inode) writeLocked(ctx context.Context, src usermem.IOSequence, offset int64) (int64, error) {
	n := src.NumBytes()
	if offset+n < offset {
		return 0, linuxerr.EINVAL
	}
	n, err := vfs.CheckLimit(ctx, offset, n)
	if err != nil {
		return 0, err
	}
	src = src.TakeFirst64(n)
	if err := i.killPrivs(ctx); err != nil {
		return 0, err
	}
	if err := i.zeroTail(offset); err != nil {
		return 0, err
	}
	size := i.ei.Size()
	stale := offset > size && i.absentTail(size)
	w := &fileWriter{i: i, off: offset}
	written, err := src.CopyInTo(ctx, w)
	if w.stale || stale {
		i.staleMappings(min(offset, size), offset+n)
	}
	if written > 0 {
		if terr := i.ei.Touch(ext4.SetMtime | ext4.SetCtime); terr != nil && err == nil {
			err = toErr(terr)
		}
	}
	return written, err
}

// zeroTail clears what a shared mapping may have left beyond the end of file in its last page, before the file grows by
// something at offset end or beyond. i.mu is held, or nobody else has the inode.
func (i *inode) zeroTail(end int64) error {
	size := i.ei.Size()
	tail := min(end-size, int64(hostarch.PageSize)-size%hostarch.PageSize)
	if size%hostarch.PageSize == 0 || tail <= 0 || !i.writableMapped.Load() {
		return nil
	}
	extents, err := i.ei.Extents(size, tail, false)
	if err != nil {
		return toErr(err)
	}
	for _, e := range extents {
		if from, to := max(size, e.FileOff), min(size+tail, e.FileOff+e.Len); !e.Hole && from < to {
			if _, err := i.fs.vol.Dev.WriteAt(make([]byte, to-from), e.DevOff+from-e.FileOff); err != nil {
				return toErr(err)
			}
		}
	}
	return nil
}

// fileWriter implements safemem.Writer on the contents of an inode whose mu is held.
type fileWriter struct {
	i   *inode
	off int64

	// stale is set when blocks of the backing file have become the volume's own.
	stale bool
}

// WriteFromBlocks implements safemem.Writer.WriteFromBlocks: the host kernel copies from srcs to the image's page cache.
func (w *fileWriter) WriteFromBlocks(srcs safemem.BlockSeq) (uint64, error) {
	n := int64(min(srcs.NumBytes(), uint64(math.MaxInt64-w.off)))
	if n == 0 {
		return 0, nil
	}
	devFD := w.i.fs.vol.Dev.FD()
	if devFD < 0 {
		return w.writeBuffered(srcs)
	}
	start := w.off
	var hostErr error
	done, err := w.i.ei.WriteFunc(start, n, func(devOff, fileOff, n int64) error {
		stale, err := w.i.fs.store(devOff, n, func() error {
			part, at := srcs.DropFirst64(uint64(fileOff-start)).TakeFirst64(uint64(n)), devOff
			for !part.IsEmpty() {
				put, err := hostfd.Pwritev2(int32(devFD), part, at, 0)
				if err != nil {
					hostErr = err
					return err
				}
				part = part.DropFirst64(put)
				at += int64(put)
			}
			return nil
		})
		w.stale = w.stale || stale
		return err
	})
	w.off += done
	switch {
	case hostErr != nil:
		return uint64(done), hostErr
	case err != nil && done > 0:
		return uint64(done), nil // a short write; the next one tells why
	}
	return uint64(done), toErr(err)
}

// writeBuffered writes through ext4, for devices without a descriptor.
func (w *fileWriter) writeBuffered(srcs safemem.BlockSeq) (uint64, error) {
	buf := make([]byte, min(srcs.NumBytes(), 1<<20))
	var done uint64
	for !srcs.IsEmpty() {
		n, err := safemem.CopySeq(safemem.BlockSeqOf(safemem.BlockFromSafeSlice(buf)), srcs)
		if n > 0 {
			put, werr := w.i.ei.WriteAt(buf[:n], w.off)
			done += uint64(put)
			w.off += int64(put)
			if werr != nil {
				return done, toErr(werr)
			}
		}
		if err != nil {
			return done, err
		}
		srcs = srcs.DropFirst64(n)
	}
	return done, nil
}

// truncate sets the size as ftruncate(2) and O_TRUNC do, with times and privileges.
func (i *inode) truncate(ctx context.Context, size int64) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if err := i.killPrivs(ctx); err != nil {
		return err
	}
	if err := i.truncateLocked(size); err != nil {
		return err
	}
	return toErr(i.ei.Touch(ext4.SetMtime | ext4.SetCtime))
}

// pageEnd is the end of the last page of a file of that size.
func pageEnd(size int64) uint64 {
	end, ok := hostarch.PageRoundUp(uint64(size))
	if !ok {
		return math.MaxUint64 &^ (hostarch.PageSize - 1)
	}
	return end
}

// truncateLocked sets the size, with the care for mappings that the package comment describes. i.mu is held.
func (i *inode) truncateLocked(size int64) error {
	old := i.ei.Size()
	if size >= old {
		stale := i.absentTail(old)
		if err := i.zeroTail(size); err != nil {
			return err
		}
		err := i.ei.Truncate(size)
		if stale {
			i.staleMappings(old, size)
		}
		return toErr(err)
	}
	stale := i.absentTail(size)
	i.dataMu.Lock()
	i.mapEnd = size
	i.dataMu.Unlock()

	i.mapsMu.Lock()
	if from, to := pageEnd(size), pageEnd(old); from < to {
		i.mappings.Invalidate(memmap.MappableRange{Start: from, End: to}, memmap.InvalidateOpts{InvalidatePrivate: true})
	}
	i.mapsMu.Unlock()

	i.dataMu.Lock()
	err := i.ei.Truncate(size)
	i.mapEnd = math.MaxInt64
	i.dataMu.Unlock()
	if stale {
		i.staleMappings(size, size+1)
	}
	return toErr(err)
}

// AllocateModes implements seam.AllocateModes.
func (*regularFileFD) AllocateModes() uint64 {
	return ext4.FallocKeepSize | ext4.FallocPunchHole | ext4.FallocZeroRange
}

// Allocate implements vfs.FileDescriptionImpl.Allocate.
func (fd *regularFileFD) Allocate(ctx context.Context, mode, offset, length uint64) error {
	if offset > math.MaxInt64 || length > math.MaxInt64-offset || mode > math.MaxUint32 {
		return linuxerr.EFBIG
	}
	i := fd.inode()
	i.mu.Lock()
	defer i.mu.Unlock()
	end := int64(offset + length)
	if mode&ext4.FallocKeepSize == 0 {
		if limit, err := vfs.CheckLimit(ctx, 0, end); err != nil {
			return err
		} else if limit < end {
			return linuxerr.EFBIG
		}
		if err := i.zeroTail(end); err != nil {
			return err
		}
	}
	if err := i.killPrivs(ctx); err != nil {
		return err
	}
	var err error
	if mode&(ext4.FallocPunchHole|ext4.FallocZeroRange) != 0 {
		err = i.punch(uint32(mode), int64(offset), int64(length))
	} else {
		size := i.ei.Size()
		stale := end > size && i.absentTail(size)
		err = toErr(i.ei.Fallocate(uint32(mode), int64(offset), int64(length)))
		if stale {
			i.staleMappings(size, size+1)
		}
	}
	if err != nil {
		return err
	}
	return toErr(i.ei.Touch(ext4.SetMtime | ext4.SetCtime))
}

// punch makes a range read as zeros. While the file is mapped no block may leave it, so zeros are written then. i.mu is
// held; holding mapsMu keeps new mappings away.
func (i *inode) punch(mode uint32, off, n int64) error {
	i.mapsMu.Lock()
	defer i.mapsMu.Unlock()
	size := i.ei.Size()
	err := i.punchLocked(mode, off, n)
	if i.fs.layered != nil {
		i.staleMappingsLocked(min(off, size), off+n)
	}
	return err
}

// punchLocked is punch with mapsMu held.
func (i *inode) punchLocked(mode uint32, off, n int64) error {
	i.dataMu.Lock()
	defer i.dataMu.Unlock()
	if i.mappings.IsEmpty() {
		return toErr(i.ei.Fallocate(mode, off, n))
	}
	size := i.ei.Size()
	if mode&ext4.FallocKeepSize == 0 && off+n > size {
		if err := i.ei.Truncate(off + n); err != nil {
			return toErr(err)
		}
		size = off + n
	}
	end := min(off+n, size)
	if off >= end {
		return nil
	}
	extents, err := i.ei.Extents(off, end-off, false)
	if err != nil {
		return toErr(err)
	}
	zeros := make([]byte, 64<<10)
	for _, e := range extents {
		if e.Hole {
			continue
		}
		for at, stop := max(off, e.FileOff), min(end, e.FileOff+e.Len); at < stop; {
			put, err := i.ei.WriteAt(zeros[:min(int64(len(zeros)), stop-at)], at)
			if err != nil {
				return toErr(err)
			}
			at += int64(put)
		}
	}
	return nil
}

// Seek implements vfs.FileDescriptionImpl.Seek.
func (fd *regularFileFD) Seek(_ context.Context, offset int64, whence int32) (int64, error) {
	fd.offMu.Lock()
	defer fd.offMu.Unlock()
	ei := fd.inode().ei
	var err error
	switch whence {
	case linux.SEEK_SET:
	case linux.SEEK_CUR:
		offset += fd.off
	case linux.SEEK_END:
		offset += ei.Size()
	case linux.SEEK_DATA, linux.SEEK_HOLE:
		if offset < 0 || offset >= ei.Size() {
			return 0, linuxerr.ENXIO
		}
		if whence == linux.SEEK_DATA {
			offset, err = ei.SeekData(offset)
		} else {
			offset, err = ei.SeekHole(offset)
		}
		if err != nil {
			return 0, toErr(err)
		}
	default:
		return 0, linuxerr.EINVAL
	}
	if offset < 0 {
		return 0, linuxerr.EINVAL
	}
	fd.off = offset
	return offset, nil
}

// ConfigureMMap implements vfs.FileDescriptionImpl.ConfigureMMap.
func (fd *regularFileFD) ConfigureMMap(_ context.Context, opts *memmap.MMapOpts) error {
	i := fd.inode()
	if !i.fs.mappable() {
		return linuxerr.ENODEV
	}
	return vfs.GenericConfigureMMap(&fd.vfsfd, i, opts)
}
