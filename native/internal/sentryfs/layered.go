package sentryfs

import (
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/sentry/memmap"

	"gvx.dev/gvx/native/internal/ext4"
)

// source tells where n bytes of the device at off are read from: a host descriptor, -1 for zeros, and for how many
// bytes that holds.
func (fs *filesystem) source(off, n int64) (int, int64) {
	l := fs.layered
	if l == nil {
		return fs.vol.Dev.FD(), n
	}
	present, n := l.Present(off, n)
	switch base := l.BaseSize(); {
	case present:
		return l.FD(), n
	case off >= base:
		return -1, n
	default:
		return l.BaseFD(), min(n, base-off)
	}
}

// store calls write to store n bytes in the device's own file at off, and brings along what their blocks hold else. It tells
// whether blocks were absent: then staleMappings is due once no lock of an address space is held.
func (fs *filesystem) store(off, n int64, write func() error) (bool, error) {
	if fs.layered == nil {
		return false, write()
	}
	return fs.layered.WriteWith(off, n, write)
}

// absentIn tells whether something stored in the file at [off, end) lies in the backing file only, so that changing
// it leaves stale mappings.
func (i *inode) absentIn(off, end int64) bool {
	l := i.fs.layered
	if l == nil || off >= end {
		return false
	}
	extents, err := i.ei.Extents(off, end-off, false)
	if err != nil {
		return false // whoever changes something there gets the error
	}
	for _, e := range extents {
		from, to := max(off, e.FileOff), min(end, e.FileOff+e.Len)
		if e.Hole || from >= to {
			continue
		}
		if present, n := l.Present(e.DevOff+from-e.FileOff, to-from); !present || n < to-from {
			return true
		}
	}
	return false
}

// absentTail is absentIn for the page that holds the end of a file of that size, whose rest may be cleared.
func (i *inode) absentTail(size int64) bool {
	return i.absentIn(size&^(hostarch.PageSize-1), size)
}

// staleMappings takes back translations of pages at [off, end) of the file, which may be the backing file's while the
// blocks are the volume's own by now. Whoever translates later sees them present. Private copies stay.
// Neither dataMu nor a lock of an address space may be held.
func (i *inode) staleMappings(off, end int64) {
	i.mapsMu.Lock()
	defer i.mapsMu.Unlock()
	i.staleMappingsLocked(off, end)
}

// staleMappingsLocked is staleMappings with mapsMu held.
func (i *inode) staleMappingsLocked(off, end int64) {
	if i.mappings.IsEmpty() {
		return
	}
	i.mappings.Invalidate(memmap.MappableRange{
		Start: uint64(off) &^ (hostarch.PageSize - 1), End: pageEnd(end),
	}, memmap.InvalidateOpts{})
}

// copyUp makes what is stored of mr the volume's own, before it is mapped where somebody may write.
func (i *inode) copyUp(extents []ext4.Extent, mr memmap.MappableRange) error {
	l := i.fs.layered
	if l == nil {
		return nil
	}
	for _, e := range extents {
		if piece := pieceOf(e, mr); !e.Hole && piece.Length() != 0 {
			if err := l.CopyUp(e.DevOff+int64(piece.Start)-e.FileOff, int64(piece.Length())); err != nil {
				return err
			}
		}
	}
	return nil
}

// mapped is where a page of the device is mapped from: its own file or the backing file, and for how many bytes of n that
// holds. No file means zeros. Pages of the backing file are never for writing.
func (fs *filesystem) mapped(off, n int64) (memmap.File, hostarch.AccessType, int64) {
	l := fs.layered
	if l == nil {
		return &fs.mf, hostarch.AnyAccess, n
	}
	present, n := l.Present(off, n)
	if present {
		return &fs.mf, hostarch.AnyAccess, n
	}
	if end := int64(pageEnd(l.BaseSize())); off < end {
		return &fs.baseMF, hostarch.ReadExecute, min(n, end-off)
	}
	return nil, hostarch.ReadExecute, n
}
