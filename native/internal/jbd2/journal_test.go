package jbd2

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// formats are the journals that exist: version, features.
var formats = map[string][2]uint32{
	"v1":             {kindSuperV1, 0},
	"v2":             {kindSuperV2, 0},
	"64bit":          {kindSuperV2, incompat64bit},
	"csum v2":        {kindSuperV2, incompatCsumV2 | incompatRevoke},
	"csum v2, 64bit": {kindSuperV2, incompatCsumV2 | incompat64bit},
	"csum v3":        {kindSuperV2, incompatCsumV3},
	"csum v3, 64bit": {kindSuperV2, incompatCsumV3 | incompat64bit | incompatRevoke},
	"fast commits":   {kindSuperV2, incompatCsumV3 | incompatFast},
}

// TestWhatIsCommittedIsThere changes, frees and reuses blocks at random, over many rounds of the log. Whenever a commit
// returns, the device with its log replayed is exactly what it promised; whatever was written since does not show.
func TestWhatIsCommittedIsThere(t *testing.T) {
	for name, f := range formats {
		for _, durable := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%t", name, durable), func(t *testing.T) {
				t.Parallel()
				m := newMemory(testVolume * testBlock)
				format(m, f[0], f[1])
				exercise(t, m, durable)
			})
		}
	}
}

func exercise(t *testing.T, m *memory, durable bool) {
	j := openTest(t, m, Config{Durable: durable})
	r := rand.New(rand.NewPCG(3, 4))
	const blocks = 400 // of the volume, from 100 on
	cache := map[uint64]*Block{}
	want := map[uint64][]byte{} // content now, and at the last commit
	promised := map[uint64][]byte{}
	data := map[uint64][]byte{} // blocks that hold data: written directly
	pending := map[uint64]bool{}
	img := make([]byte, len(m.data))
	check := func(when string) {
		m.mu.Lock()
		if durable {
			copy(img, m.stable)
		} else {
			copy(img, m.data)
		}
		m.mu.Unlock()
		recovered(t, img)
		for n, p := range data {
			if got := img[n*testBlock : (n+1)*testBlock]; !bytes.Equal(got, p) {
				t.Fatalf("%s: data block %d begins %x, not %x", when, n, got[:8], p[:8])
			}
		}
		for n, p := range promised {
			if got := img[n*testBlock : (n+1)*testBlock]; !bytes.Equal(got, p) {
				t.Fatalf("%s: block %d begins %x, not %x", when, n, got[:8], p[:8])
			}
		}
	}
	last := j.Running()
	for round := range 250 {
		h := begin(t, j, 40)
		if h.Tid() != last { // the one before was full
			if _, err := j.Commit(last); err != nil {
				t.Fatal(err)
			}
			promised, last = maps.Clone(want), h.Tid()
		}
		for range r.IntN(40) {
			n := uint64(100 + r.IntN(blocks))
			switch {
			case data[n] != nil || pending[n]:
				continue
			case cache[n] != nil && r.IntN(8) == 0: // freed
				h.Forget(n, cache[n])
				delete(cache, n)
				delete(want, n)
				pending[n] = true
			default:
				b := cache[n]
				if b == nil {
					b = block(m, n)
					cache[n] = b
				}
				h.Get(b)
				be.PutUint64(b.Data, r.Uint64())
				if r.IntN(10) == 0 {
					be.PutUint32(b.Data, magic)
				}
				want[n] = bytes.Clone(b.Data)
			}
		}
		h.End()
		if r.IntN(3) > 0 {
			continue
		}
		check(fmt.Sprint("before commit ", round))
		commit(t, j)
		promised, last = maps.Clone(want), j.Running()
		check(fmt.Sprint("after commit ", round))
		// Freed blocks become data, some of them metadata again later.
		for n := range data {
			if r.IntN(2) == 0 {
				delete(data, n)
			}
		}
		for n := range pending {
			p := bytes.Repeat([]byte{byte(round)}, testBlock)
			m.WriteAt(p, int64(n)*testBlock) //nolint:errcheck // never fails
			if durable {
				m.Flush() //nolint:errcheck
			}
			data[n] = p
			delete(pending, n)
		}
		check(fmt.Sprint("after reuse ", round))
	}
	s := j.Stats()
	if s.Checkpoints == 0 || s.Revokes == 0 || s.Commits < 40 {
		t.Errorf("not much happened: %+v", s)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	img = m.image()
	if blocks, err := replay(img); blocks != nil || err != nil {
		t.Errorf("the log is not empty: %d blocks, %v", len(blocks), err)
	}
	for n, p := range want {
		if !bytes.Equal(img[n*testBlock:(n+1)*testBlock], p) {
			t.Errorf("block %d is not in its place", n)
		}
	}
	openTest(t, m, Config{}) // and may be opened again
}

// gate holds up writes to a part of the device.
type gate struct {
	lo, hi  int64
	reached chan struct{}
	open    chan struct{}
	once    sync.Once
}

func newGate(lo, hi uint64) *gate {
	return &gate{lo: int64(lo) * testBlock, hi: int64(hi) * testBlock, reached: make(chan struct{}), open: make(chan struct{})}
}

func (g *gate) pass(off int64, _ []byte) {
	if off >= g.lo && off < g.hi {
		g.once.Do(func() { close(g.reached) })
		<-g.open
	}
}

// TestOperationsGoOnWhileACommitIsWritten: a transaction is logged as it was when it ended, whatever the next one does
// to its blocks meanwhile.
func TestOperationsGoOnWhileACommitIsWritten(t *testing.T) {
	m := newMemory(testVolume * testBlock)
	format(m, kindSuperV2, incompatCsumV3)
	j := openTest(t, m, Config{})
	var list []*Block
	h := begin(t, j, 100)
	for n := range uint64(100) {
		b := block(m, 100+n)
		h.Get(b)
		b.Data[0] = 1
		list = append(list, b)
	}
	h.End()
	log := newGate(testRuns[0].Start, testRuns[0].Start+1) // the journal's superblock: before any block is copied
	m.onWrite = log.pass
	done := make(chan error)
	go func() {
		_, err := j.Commit(0)
		done <- err
	}()
	<-log.reached
	h = begin(t, j, 100)
	for k, b := range list[:50] {
		h.Get(b)
		b.Data[0] = 2
		if k < 10 {
			h.Forget(b.Number, b)
		}
	}
	h.End()
	close(log.open)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if s := j.Stats(); s.Frozen != 50 {
		t.Errorf("%d blocks were copied, want 50", s.Frozen)
	}
	img := recovered(t, m.image())
	for n := range 100 {
		if got := img[(100+n)*testBlock]; got != 1 {
			t.Fatalf("block %d has %d of the next transaction", 100+n, got)
		}
	}
	commit(t, j)
	img = recovered(t, m.image())
	for n := 10; n < 100; n++ {
		want := byte(1)
		if n < 50 {
			want = 2
		}
		if got := img[(100+n)*testBlock]; got != want {
			t.Fatalf("block %d has %d, want %d", 100+n, got, want)
		}
	}
}

// TestNoCheckpointOverFreedBlocks: a block is given back only when no checkpoint is on its way to it.
func TestNoCheckpointOverFreedBlocks(t *testing.T) {
	m := newMemory(testVolume * testBlock)
	format(m, kindSuperV2, incompatCsumV3)
	var released atomic.Bool
	var tids atomic.Uint64
	j := openTest(t, m, Config{AfterCommit: func(tid uint64) {
		if tids.Add(1) == 2 {
			released.Store(true)
		}
	}})
	b := block(m, 500)
	h := begin(t, j, 1)
	h.Get(b)
	b.Data[0] = 1
	h.End()
	commit(t, j)
	place := newGate(500, 501)
	m.onWrite = place.pass
	checkpointed := make(chan error)
	go func() { checkpointed <- j.checkpoint(0) }()
	<-place.reached
	h = begin(t, j, 1)
	h.Forget(500, b)
	h.End()
	done := make(chan error)
	go func() {
		_, err := j.Commit(0)
		done <- err
	}()
	time.Sleep(30 * time.Millisecond)
	if released.Load() {
		t.Error("the block was given back while a checkpoint was writing to it")
	}
	close(place.open)
	if err := errors.Join(<-checkpointed, <-done); err != nil {
		t.Fatal(err)
	}
	if !released.Load() {
		t.Error("the block was never given back")
	}
	// From here on nothing writes to it.
	m.onWrite = func(off int64, _ []byte) {
		if off == 500*testBlock {
			t.Error("a checkpoint wrote to a freed block")
		}
	}
	if err := j.checkpoint(0); err != nil {
		t.Fatal(err)
	}
}

// TestBarriers: what is flushed when.
func TestBarriers(t *testing.T) {
	place := func(e event) string {
		switch n := uint64(e.off) / testBlock; {
		case e.n == 0:
			return "flush"
		case n == testRuns[0].Start:
			return "super"
		case n > testRuns[0].Start && n < testRuns[0].Start+100:
			return fmt.Sprint("log ", e.n/testBlock)
		}
		return "place"
	}
	for _, c := range []struct {
		durable bool
		want    []string
	}{
		{true, []string{"super", "log 2", "flush", "log 1", "flush", "place", "flush", "super", "flush", "super", "flush"}},
		{false, []string{"super", "log 3", "place", "super", "super"}},
	} {
		m := newMemory(testVolume * testBlock)
		format(m, kindSuperV2, incompatCsumV3)
		j := openTest(t, m, Config{Durable: c.durable})
		b := block(m, 500)
		h := begin(t, j, 1)
		h.Get(b)
		b.Data[0] = 1
		h.End()
		if flushed, err := j.Commit(h.Tid()); err != nil || !flushed {
			t.Fatal(flushed, err)
		}
		if flushed, err := j.Commit(h.Tid()); err != nil || flushed {
			t.Errorf("committed twice: %t, %v", flushed, err)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range m.events {
			got = append(got, place(e))
		}
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("durable %t:\n got  %v\n want %v", c.durable, got, c.want)
		}
	}
}

// TestErrorsEndTheJournal: after a write or flush has failed nothing is promised and nothing is written.
func TestErrorsEndTheJournal(t *testing.T) {
	for _, during := range []string{"commit", "flush", "checkpoint", "hook"} {
		t.Run(during, func(t *testing.T) {
			m := newMemory(testVolume * testBlock)
			format(m, kindSuperV2, incompatCsumV3)
			var aborts atomic.Int32
			var hook error
			j := openTest(t, m, Config{
				Durable:      true,
				OnAbort:      func(error) { aborts.Add(1) },
				BeforeCommit: func(*Handle) error { return hook },
			})
			b := block(m, 500)
			h := begin(t, j, 1)
			h.Get(b)
			h.End()
			var err error
			switch during {
			case "commit":
				m.setFail(syscall.EIO)
				_, err = j.Commit(0)
			case "flush":
				m.onFlush = func() { m.setFail(syscall.EIO) }
				_, err = j.Commit(0)
			case "checkpoint":
				commit(t, j)
				m.setFail(syscall.ENOSPC)
				err = j.checkpoint(0)
			case "hook":
				hook = syscall.EUCLEAN
				_, err = j.Commit(0)
			}
			if err == nil {
				t.Fatal("no error")
			}
			m.setFail(nil)
			m.onFlush = nil
			events := len(m.events)
			if _, err := j.Begin(1); err == nil {
				t.Error("a handle can still be had")
			}
			if _, err := j.Commit(0); err == nil {
				t.Error("a commit succeeds")
			}
			if err := j.Close(); err == nil {
				t.Error("close succeeds")
			}
			if len(m.events) != events || aborts.Load() != 1 {
				t.Errorf("%d events more, %d aborts", len(m.events)-events, aborts.Load())
			}
		})
	}
}

// TestTheErrorIsNoted: whoever recovers the volume learns of the failure.
func TestTheErrorIsNoted(t *testing.T) {
	m := newMemory(testVolume * testBlock)
	format(m, kindSuperV2, incompatCsumV3)
	j := openTest(t, m, Config{})
	j.Abort(fmt.Errorf("somewhere: %w", syscall.EUCLEAN))
	sb := m.image()[testRuns[0].Start*testBlock:]
	if got := int32(be.Uint32(sb[sErrno:])); got != -int32(syscall.EUCLEAN) {
		t.Errorf("s_errno is %d", got)
	}
	if _, err := replay(m.image()); err != nil {
		t.Error(err)
	}
}

// TestManyWriters fills the log from many goroutines that announce far more than they use; none waits for ever, no
// transaction outgrows its share, and nothing is lost.
func TestManyWriters(t *testing.T) {
	for _, durable := range []bool{false, true} {
		m := newMemory(testVolume * testBlock)
		format(m, kindSuperV2, incompatCsumV3|incompat64bit)
		j := openTest(t, m, Config{Durable: durable, Interval: time.Millisecond})
		var mu [300]sync.Mutex
		var list [300]*Block
		for k := range list {
			list[k] = block(m, uint64(100+k))
		}
		var wg sync.WaitGroup
		for w := range 8 {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(w), 9))
				for range 300 {
					h, err := j.Begin(60)
					if err != nil {
						t.Error(err)
						return
					}
					for range 1 + r.IntN(10) { // a transaction of nothing is never committed
						k := r.IntN(len(list))
						mu[k].Lock()
						h.Get(list[k])
						be.PutUint64(list[k].Data, be.Uint64(list[k].Data)+1)
						mu[k].Unlock()
					}
					tid := h.Tid()
					h.End()
					if r.IntN(20) == 0 {
						if _, err := j.Commit(tid); err != nil || !j.Committed(tid) {
							t.Error(err)
						}
					}
				}
			})
		}
		wg.Wait()
		commit(t, j)
		img := recovered(t, m.image())
		for _, b := range list {
			if !bytes.Equal(img[b.Number*testBlock:(b.Number+1)*testBlock], b.Data) {
				t.Errorf("block %d is lost", b.Number)
			}
		}
		if s := j.Stats(); s.Overruns != 0 || s.Commits < 10 {
			t.Errorf("%+v", s)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestInterval: what nobody syncs is committed after a while.
func TestInterval(t *testing.T) {
	m := newMemory(testVolume * testBlock)
	format(m, kindSuperV2, 0)
	j := openTest(t, m, Config{Interval: 10 * time.Millisecond})
	h := begin(t, j, 1)
	h.Get(block(m, 500))
	h.End()
	for end := time.Now().Add(10 * time.Second); !j.Committed(h.Tid()); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never")
		}
	}
}

// TestOpenRefuses: a journal that holds something, is damaged, or unknown.
func TestOpenRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		change func(sb []byte)
		want   error
	}{
		"needs recovery":   {func(sb []byte) { be.PutUint32(sb[sStart:], 7) }, ErrNeedsRecovery},
		"magic":            {func(sb []byte) { sb[0] = 0 }, syscall.EUCLEAN},
		"type":             {func(sb []byte) { sb[7] = 9 }, syscall.EUCLEAN},
		"block size":       {func(sb []byte) { be.PutUint32(sb[sBlockSize:], 4096) }, syscall.EUCLEAN},
		"too long":         {func(sb []byte) { be.PutUint32(sb[sMaxLen:], 801) }, syscall.EUCLEAN},
		"first":            {func(sb []byte) { be.PutUint32(sb[sFirst:], 0) }, syscall.EUCLEAN},
		"first beyond":     {func(sb []byte) { be.PutUint32(sb[sFirst:], 900) }, syscall.EUCLEAN},
		"too short":        {func(sb []byte) { be.PutUint32(sb[sMaxLen:], 300) }, syscall.EOPNOTSUPP},
		"unknown feature":  {func(sb []byte) { be.PutUint32(sb[sIncompat:], 0x1000) }, syscall.EOPNOTSUPP},
		"ro feature":       {func(sb []byte) { be.PutUint32(sb[sRoCompat:], 1) }, syscall.EOPNOTSUPP},
		"checksum type":    {func(sb []byte) { sb[sChecksumType] = 1 }, syscall.EOPNOTSUPP},
		"only fast blocks": {func(sb []byte) { be.PutUint32(sb[sIncompat:], incompatFast); be.PutUint32(sb[sNumFCBlocks:], 800) }, syscall.EUCLEAN},
	} {
		m := newMemory(testVolume * testBlock)
		format(m, kindSuperV2, incompatCsumV3)
		sb := m.data[testRuns[0].Start*testBlock:][:testBlock]
		c.change(sb)
		be.PutUint32(sb[sChecksum:], sumAround(^uint32(0), sb, sChecksum))
		if _, err := Open(m, testRuns, Config{BlockSize: testBlock}); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		if len(m.events) != 0 {
			t.Errorf("%s: something was written", name)
		}
	}
	m := newMemory(testVolume * testBlock)
	format(m, kindSuperV2, incompatCsumV3)
	m.data[testRuns[0].Start*testBlock+sFirst+3]++
	if _, err := Open(m, testRuns, Config{BlockSize: testBlock}); !errors.Is(err, syscall.EUCLEAN) {
		t.Errorf("wrong checksum: %v", err)
	}
	for _, runs := range [][]Run{nil, {{testVolume - 1, 800}}, {{1<<64 - 1, 3}}} {
		if _, err := Open(m, runs, Config{BlockSize: testBlock}); !errors.Is(err, syscall.EUCLEAN) {
			t.Errorf("runs %v: %v", runs, err)
		}
	}
}
