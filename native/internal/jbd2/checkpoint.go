package jbd2

import (
	"cmp"
	"fmt"
	"slices"
)

// makeRoom returns when the log has room for transaction t, or t is not running any more.
func (j *Journal) makeRoom(t *transaction) error {
	for {
		if err := j.Err(); err != nil {
			return err
		}
		select {
		case <-t.switched:
			return nil
		default:
		}
		total := j.log.last - j.log.first
		j.mu.Lock()
		need := j.used + j.maxSize + 2
		behind := j.committing != nil
		if behind {
			need += j.committing.size
		}
		j.mu.Unlock()
		if need <= total {
			t.ready.Store(true)
			return nil
		}
		if err := j.checkpoint(total / 4); err != nil {
			return err
		}
		if behind {
			passed(&j.commitMu)
		}
	}
}

// clean checkpoints in the background.
func (j *Journal) clean() {
	defer j.background.Done()
	j.checkpoint((j.log.last - j.log.first) / 4) //nolint:errcheck // the journal remembers its errors
	j.mu.Lock()
	j.cleaning = false
	j.mu.Unlock()
}

// checkpoint brings the oldest transactions in place until those left take at
// most target blocks of the log, and gives their room free.
func (j *Journal) checkpoint(target uint32) error {
	j.cpMu.Lock()
	defer j.cpMu.Unlock()
	if err := j.Err(); err != nil {
		return err
	}
	err := j.checkpointLocked(target)
	if err != nil {
		j.Abort(err)
	}
	return err
}

func (j *Journal) checkpointLocked(target uint32) error {
	j.mu.Lock()
	keep := j.used
	var old []*transaction
	for _, t := range j.committed {
		if keep <= target {
			break
		}
		keep -= t.size
		old = append(old, t)
	}
	var items []*item
	if len(old) > 0 {
		last := old[len(old)-1].tid
		for _, it := range j.places {
			if it.txn.tid <= last {
				items = append(items, it)
			}
		}
	}
	j.mu.Unlock()
	if len(old) == 0 {
		return nil
	}
	slices.SortFunc(items, func(a, b *item) int { return cmp.Compare(a.b.Number, b.b.Number) })
	batch := max(maxPiece/4/j.log.blockSize, 1)
	for rest := items; len(rest) > 0; {
		n := min(len(rest), batch)
		if err := j.writeBack(rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
	}
	if err := j.flush(); err != nil {
		return err
	}
	return j.moveTail(items)
}

// writeBack writes committed versions of blocks to their places, neighbours
// together. Those that are newer in the log or free by now are left out.
func (j *Journal) writeBack(items []*item) error {
	j.cpIO.Lock()
	defer j.cpIO.Unlock()
	if err := j.Err(); err != nil {
		return err
	}
	bs := j.log.blockSize
	data := make([]byte, 0, len(items)*bs)
	var numbers []uint64
	var reread []*item
	j.mu.Lock()
	for _, it := range items {
		if j.places[it.b.Number] != it {
			continue
		}
		numbers = append(numbers, it.b.Number)
		if it.b.item.Load() == it {
			data = append(data, it.b.Data...)
			reread = append(reread, nil)
		} else { // changed since
			data = data[:len(data)+bs]
			reread = append(reread, it)
		}
	}
	j.mu.Unlock()
	for k, it := range reread {
		if it == nil {
			continue
		}
		p := data[k*bs : (k+1)*bs]
		if err := j.log.read(it.at, p); err != nil {
			return err
		}
		if it.escaped {
			be.PutUint32(p, magic)
		}
	}
	for k := 0; k < len(numbers); {
		n := 1
		for k+n < len(numbers) && numbers[k+n] == numbers[k]+uint64(n) {
			n++
		}
		if _, err := j.log.dev.WriteAt(data[k*bs:(k+n)*bs], int64(numbers[k])*int64(bs)); err != nil {
			return fmt.Errorf("jbd2: checkpoint of block %d: %w", numbers[k], err)
		}
		k += n
	}
	return nil
}

// moveTail forgets items, which are in their places, and gives free the log of
// transactions that have no others.
func (j *Journal) moveTail(items []*item) error {
	j.mu.Lock()
	for _, it := range items {
		if j.places[it.b.Number] == it {
			delete(j.places, it.b.Number)
			it.txn.live--
		}
		it.b.item.CompareAndSwap(it, nil)
	}
	freed := uint32(0)
	n := 0
	for ; n < len(j.committed) && j.committed[n].live == 0; n++ {
		freed += j.committed[n].size
	}
	start, tid := j.head, j.durable.Load()+1
	if n < len(j.committed) {
		start, tid = j.committed[n].start, j.committed[n].tid
	}
	j.mu.Unlock()
	// Durable before anything overwrites what lies before it.
	if err := j.log.writeSuper(start, uint32(tid), 0); err != nil {
		return err
	}
	if err := j.flush(); err != nil {
		return err
	}
	j.mu.Lock()
	j.committed = slices.Delete(j.committed, 0, n)
	j.used -= freed
	j.mu.Unlock()
	j.stats.checkpoints.Add(1)
	return nil
}
