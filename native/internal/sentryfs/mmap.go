package sentryfs

import (
	"io"

	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/sentry/memmap"

	"gvx.dev/gvx/native/internal/ext4"
)

var _ memmap.Mappable = (*inode)(nil)

// AddMapping implements memmap.Mappable.AddMapping.
func (i *inode) AddMapping(_ context.Context, ms memmap.MappingSpace, ar hostarch.AddrRange, offset uint64, writable bool) error {
	i.mapsMu.Lock()
	defer i.mapsMu.Unlock()
	if writable && !i.writableMapped.Swap(true) && i.fs.layered != nil {
		i.mappings.InvalidateAll(memmap.InvalidateOpts{}) // from now on no page is the backing file's
	}
	i.mappings.AddMapping(ms, ar, offset, writable)
	return nil
}

// RemoveMapping implements memmap.Mappable.RemoveMapping.
func (i *inode) RemoveMapping(_ context.Context, ms memmap.MappingSpace, ar hostarch.AddrRange, offset uint64, writable bool) {
	i.mapsMu.Lock()
	defer i.mapsMu.Unlock()
	i.mappings.RemoveMapping(ms, ar, offset, writable)
}

// CopyMapping implements memmap.Mappable.CopyMapping.
func (i *inode) CopyMapping(ctx context.Context, ms memmap.MappingSpace, _, dstAR hostarch.AddrRange, offset uint64, writable bool) error {
	return i.AddMapping(ctx, ms, dstAR, offset, writable)
}

// maxTranslate bounds a translation: one page fault maps so much.
const maxTranslate = 2 << 20

// clampOptional cuts optional to at most maxTranslate bytes, or to required where that is longer.
func clampOptional(required, optional memmap.MappableRange) memmap.MappableRange {
	switch {
	case required.Length() >= maxTranslate:
		return required
	case optional.Length() <= maxTranslate:
		return optional
	}
	return memmap.MappableRange{Start: required.Start, End: min(optional.End, required.Start+maxTranslate)}
}

// Translate implements memmap.Mappable.Translate: a page of the file is a page of the image.
//
// A hole of a writable volume gets a block even when it is only read: a page of zeros handed out instead would have to be
// taken back when the hole is filled, and that is not possible where it is filled by another fault. A read-only volume's holes are
// a shared page of zeros.
func (i *inode) Translate(ctx context.Context, required, optional memmap.MappableRange, at hostarch.AccessType) ([]memmap.Translation, error) {
	i.dataMu.RLock()
	defer i.dataMu.RUnlock()
	end := pageEnd(min(i.ei.Size(), i.mapEnd))
	var beyond error
	if required.End > end {
		if required.Start >= end {
			return nil, &memmap.BusError{Err: io.EOF}
		}
		beyond = &memmap.BusError{Err: io.EOF}
		required.End = end
	}
	optional.End = min(optional.End, end)
	optional = clampOptional(required, optional)

	readOnly := i.fs.vol.FS.ReadOnly()
	if readOnly && at.Write {
		return nil, &memmap.BusError{Err: linuxerr.EROFS}
	}
	extents, err := i.ei.Extents(int64(optional.Start), int64(optional.Length()), false)
	if err == nil && !readOnly && hasHole(extents, required) {
		if _, err = i.ei.Extents(int64(required.Start), int64(required.Length()), true); err == nil {
			extents, err = i.ei.Extents(int64(optional.Start), int64(optional.Length()), false)
		}
	}
	if err != nil {
		return nil, &memmap.BusError{Err: toErr(err)}
	}
	if i.writableMapped.Load() && !readOnly {
		if err := i.copyUp(extents, required); err != nil {
			return nil, &memmap.BusError{Err: toErr(err)}
		}
	}
	if at.Write {
		if err := i.ei.Touch(ext4.SetMtime | ext4.SetCtime); err != nil {
			return nil, &memmap.BusError{Err: toErr(err)}
		}
	}
	ts, err := i.translations(ctx, extents, required, optional, readOnly)
	if err == nil {
		err = beyond
	}
	return ts, err
}

// pieceOf is the part of e in mr, as file offsets.
func pieceOf(e ext4.Extent, mr memmap.MappableRange) memmap.MappableRange {
	return memmap.MappableRange{Start: uint64(e.FileOff), End: uint64(e.FileOff + e.Len)}.Intersect(mr)
}

// hasHole tells whether something in mr is not stored.
func hasHole(extents []ext4.Extent, mr memmap.MappableRange) bool {
	for _, e := range extents {
		if e.Hole && pieceOf(e, mr).Length() != 0 {
			return true
		}
	}
	return false
}

// translations makes translations of the extents that overlap required, as far as optional goes.
func (i *inode) translations(ctx context.Context, extents []ext4.Extent, required, optional memmap.MappableRange, readOnly bool) ([]memmap.Translation, error) {
	perms := hostarch.AnyAccess
	if readOnly {
		perms = hostarch.ReadExecute
	}
	var ts []memmap.Translation
	covered := required.Start
	for _, e := range extents {
		if pieceOf(e, required).Length() == 0 {
			continue
		}
		if !e.Hole {
			var err error
			if ts, err = i.stored(ctx, ts, e, required, optional, perms); err != nil {
				return ts, err
			}
			covered = pieceOf(e, required).End
			continue
		}
		piece := pieceOf(e, required)
		var err error
		if ts, err = i.zeros(ctx, ts, piece); err != nil {
			return ts, err
		}
		covered = piece.End
	}
	if covered < required.End {
		return ts, &memmap.BusError{Err: linuxerr.EIO} // ext4 gave no extent for a part of the file
	}
	return ts, nil
}

// stored adds translations of what e stores in required, as far as optional goes.
func (i *inode) stored(ctx context.Context, ts []memmap.Translation, e ext4.Extent, required, optional memmap.MappableRange, perms hostarch.AccessType) ([]memmap.Translation, error) {
	piece := pieceOf(e, optional)
	toDev := uint64(e.DevOff) - uint64(e.FileOff)
	if (toDev+piece.Start)%hostarch.PageSize != 0 || piece.Start%hostarch.PageSize != 0 || piece.End%hostarch.PageSize != 0 {
		return ts, &memmap.BusError{Err: linuxerr.EIO} // a block smaller than a page: ConfigureMMap refuses such volumes
	}
	for at := piece.Start; at < piece.End && at < required.End; {
		file, most, n := i.fs.mapped(int64(toDev+at), int64(piece.End-at))
		source := memmap.MappableRange{Start: at, End: at + uint64(n)}
		at = source.End
		switch {
		case source.Intersect(required).Length() == 0:
		case file == nil:
			var err error
			if ts, err = i.zeros(ctx, ts, source.Intersect(required)); err != nil {
				return ts, err
			}
		default:
			ts = append(ts, memmap.Translation{Source: source, File: file, Offset: toDev + source.Start, Perms: perms.Intersect(most)})
		}
	}
	return ts, nil
}

// zeros adds translations of pages to the page of zeros.
func (i *inode) zeros(ctx context.Context, ts []memmap.Translation, mr memmap.MappableRange) ([]memmap.Translation, error) {
	zeros, err := i.fs.zeroPage(ctx)
	if err != nil {
		return ts, &memmap.BusError{Err: err}
	}
	for at := mr.Start; at < mr.End; at += hostarch.PageSize {
		source := memmap.MappableRange{Start: at, End: at + hostarch.PageSize}
		ts = append(ts, memmap.Translation{Source: source, File: i.fs.zeroMF, Offset: zeros.Start, Perms: hostarch.ReadExecute})
	}
	return ts, nil
}

// InvalidateUnsavable implements memmap.Mappable.InvalidateUnsavable: the image file is another one after a restore.
func (i *inode) InvalidateUnsavable(context.Context) error {
	i.mapsMu.Lock()
	defer i.mapsMu.Unlock()
	i.mappings.InvalidateAll(memmap.InvalidateOpts{})
	return nil
}
