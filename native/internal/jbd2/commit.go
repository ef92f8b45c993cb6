package jbd2

import (
	"fmt"
	"slices"
	"syscall"
)

// Commit returns when transaction tid is durable; 0 means all that is there now.
// flushed tells whether the device was flushed in between, if Config.Durable asks
// for that: it is false when there was nothing to commit.
func (j *Journal) Commit(tid uint64) (flushed bool, err error) {
	if tid != 0 && j.Committed(tid) {
		return false, nil
	}
	j.commitMu.Lock()
	defer j.commitMu.Unlock()
	if tid != 0 && j.Committed(tid) {
		return false, nil
	}
	if err := j.Err(); err != nil {
		return false, err
	}
	t, err := j.detach()
	if err != nil {
		j.Abort(err)
		return false, err
	}
	if t == nil {
		return false, nil
	}
	if err := j.writeOut(t); err != nil {
		j.Abort(err)
		return false, err
	}
	j.settle(t)
	return true, nil
}

// detach puts a new transaction in the running one's place and gives the old
// one, nil when nothing is in it. commitMu is held.
func (j *Journal) detach() (*transaction, error) {
	j.barrier.Lock()
	defer j.barrier.Unlock()
	t := j.running
	if err := j.Err(); err != nil { // a handle may have failed half done
		return nil, err
	}
	if t.blocks.Load() == 0 && len(t.revoked) == 0 && len(t.items) == 0 {
		return nil, nil
	}
	if j.cfg.BeforeCommit != nil {
		t.promised.Add(hookCredits)
		h := &Handle{j: j, t: t, credits: hookCredits}
		if err := j.cfg.BeforeCommit(h); err != nil {
			return nil, err
		}
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if t.timer != nil {
		t.timer.Stop()
	}
	t.items = slices.DeleteFunc(t.items, func(it *item) bool { return it.dropped })
	t.size = j.sizeOf(t)
	t.start = j.head
	j.committing = t
	j.running = newTransaction(t.tid + 1)
	j.gathering.Store(t.tid + 1)
	close(t.switched)
	return t, nil
}

// sizeOf counts the blocks of the log that t takes.
func (j *Journal) sizeOf(t *transaction) uint32 {
	up := func(n, per int) int { return (n + per - 1) / per }
	return uint32(up(len(t.revoked), j.log.revokesPer()) + up(len(t.items), j.log.tagsPer) + len(t.items) + 1)
}

// writeOut writes t to the log. commitMu is held.
func (j *Journal) writeOut(t *transaction) error {
	total := j.log.last - j.log.first
	j.mu.Lock()
	tight := j.used+t.size > total
	j.mu.Unlock()
	if tight { // it outgrew what was promised
		if err := j.checkpoint(0); err != nil {
			return err
		}
		if t.size > total {
			return fmt.Errorf("jbd2: a transaction of %d blocks is too large for a log of %d: %w", t.size, total, syscall.EIO)
		}
	}
	if !j.active {
		if err := j.log.writeSuper(t.start, uint32(t.tid), 0); err != nil {
			return err
		}
		j.active = true
	}
	w := writer{j: j, pos: t.start, seq: uint32(t.tid)}
	w.revokes(t.revoked)
	for rest := t.items; len(rest) > 0; {
		n := min(len(rest), j.log.tagsPer)
		if err := w.group(rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
	}
	if j.cfg.Durable {
		if err := w.flush(); err != nil {
			return err
		}
		if err := j.flush(); err != nil {
			return err
		}
	}
	w.commit()
	if err := w.flush(); err != nil {
		return err
	}
	return j.flush()
}

// settle makes t, which is durable, part of what waits to be checkpointed.
func (j *Journal) settle(t *transaction) {
	j.mu.Lock()
	for _, it := range t.items {
		if old := j.places[it.b.Number]; old != nil {
			old.txn.live--
		}
		j.places[it.b.Number] = it
		it.frozen = nil
	}
	t.live = len(t.items)
	for _, blk := range t.revoked {
		if it := j.places[blk]; it != nil {
			it.txn.live--
			delete(j.places, blk)
		}
	}
	j.stats.commits.Add(1)
	j.stats.blocks.Add(int64(len(t.items)))
	j.stats.revokes.Add(int64(len(t.revoked)))
	t.items, t.revoked = nil, nil
	j.committed = append(j.committed, t)
	j.used += t.size
	j.head = j.log.after(t.start, t.size)
	j.committing = nil
	j.durable.Store(t.tid)
	full := j.used > (j.log.last-j.log.first)/2 && !j.cleaning
	if full {
		j.cleaning = true
		j.background.Add(1)
	}
	j.mu.Unlock()
	// A batch that was on its way to a block revoked just now has arrived after this.
	passed(&j.cpIO)
	if j.cfg.AfterCommit != nil {
		j.cfg.AfterCommit(t.tid)
	}
	if full {
		go j.clean()
	}
}

// writer gathers blocks of the log, so that a small transaction is one write.
type writer struct {
	j   *Journal
	pos uint32
	seq uint32
}

// add gives a zeroed block at the end of the buffer. It is valid until the next add.
func (w *writer) add() []byte {
	j := w.j
	n := len(j.buf)
	j.buf = slices.Grow(j.buf, j.log.blockSize)[:n+j.log.blockSize]
	p := j.buf[n:]
	clear(p)
	return p
}

func (w *writer) flush() error {
	pos, err := w.j.log.write(w.pos, w.j.buf)
	w.pos = pos
	if cap(w.j.buf) > 4*maxPiece {
		w.j.buf = nil
	}
	w.j.buf = w.j.buf[:0]
	return err
}

// revokes adds the revoke blocks.
func (w *writer) revokes(list []uint64) {
	l := w.j.log
	for per := l.revokesPer(); len(list) > 0; {
		n := min(len(list), per)
		p := w.add()
		putHeader(p, kindRevoke, w.seq)
		at := revokeHeader
		for _, blk := range list[:n] {
			if l.wide {
				be.PutUint64(p[at:], blk)
			} else {
				be.PutUint32(p[at:], uint32(blk))
			}
			at += l.recordSize()
		}
		be.PutUint32(p[12:], uint32(at))
		l.seal(p)
		list = list[n:]
	}
}

// group adds a descriptor block and the blocks it names, and writes when that makes a large piece.
func (w *writer) group(items []*item) error {
	j, l := w.j, w.j.log
	desc := len(j.buf)
	bs := l.blockSize
	pos := l.after(w.pos, uint32(desc/bs)) // of the descriptor
	w.add()
	for range items {
		w.add()
	}
	j.take(items, j.buf[desc+bs:], pos)
	p := j.buf[desc : desc+bs]
	putHeader(p, kindDescriptor, w.seq)
	at := headerSize
	for k, it := range items {
		data := j.buf[desc+(k+1)*bs : desc+(k+2)*bs]
		flags := uint32(0)
		if k > 0 {
			flags |= flagSameUUID
		}
		if k == len(items)-1 {
			flags |= flagLast
		}
		if it.escaped {
			flags |= flagEscape
		}
		l.putTag(p[at:], it.b.Number, flags, w.seq, data)
		at += l.tagSize
		if k == 0 {
			at += copy(p[at:], l.uuid)
		}
	}
	l.seal(p)
	if len(j.buf) >= maxPiece {
		return w.flush()
	}
	return nil
}

// take copies the bytes of items, as they were when the transaction ended, to dst. From then on
// they may change freely. The descriptor before them is at pos.
func (j *Journal) take(items []*item, dst []byte, pos uint32) {
	const atOnce = 64 // blocks copied without letting others get at mu
	bs := j.log.blockSize
	for len(items) > 0 {
		n := min(len(items), atOnce)
		j.mu.Lock()
		for k, it := range items[:n] {
			p := dst[k*bs : (k+1)*bs]
			if it.frozen != nil {
				copy(p, it.frozen)
			} else {
				copy(p, it.b.Data)
			}
			it.taken = true
			pos = j.log.after(pos, 1)
			it.at = pos
			if it.escaped = be.Uint32(p) == magic; it.escaped {
				clear(p[:4])
			}
		}
		j.mu.Unlock()
		items, dst = items[n:], dst[n*bs:]
	}
}

// commit adds the commit block.
func (w *writer) commit() {
	l := w.j.log
	p := w.add()
	putHeader(p, kindCommit, w.seq)
	now := w.j.cfg.Now()
	be.PutUint64(p[cSeconds:], uint64(max(now.Unix(), 0)))
	be.PutUint32(p[cNanos:], uint32(now.Nanosecond()))
	if l.csum != 0 {
		be.PutUint32(p[cChecksum:], sumAround(l.seed, p, cChecksum))
	}
}
