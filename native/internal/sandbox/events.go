package sandbox

import (
	"encoding/json"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Event names; docs/episode.md describes when each is written.
const (
	EventSupervisor = "supervisor"
	EventPublished  = "published"
	EventStarted    = "started"
	EventExit       = "exit"
	EventError      = "error"
)

// Error kinds of an "error" event.
const (
	KindSpec     = "spec"     // the episode document is wrong
	KindSetup    = "setup"    // the supervisor could not prepare sockets, descriptors or itself
	KindStart    = "start"    // the Sentry could not start the guest
	KindVolume   = "volume"   // a volume could not be mounted, or not be closed cleanly
	KindSentry   = "sentry"   // the Sentry died without a word
	KindLifeline = "lifeline" // the launcher went away
)

// Event is one line of the events stream. Zero fields are left out, except those that the event defines.
type Event struct {
	Event   string       `json:"event"`
	TimeNS  int64        `json:"t_ns"` // CLOCK_MONOTONIC
	PID     int          `json:"pid,omitempty"`
	Code    *int         `json:"code,omitempty"`
	Signal  *int         `json:"signal,omitempty"`
	Kind    string       `json:"kind,omitempty"`
	Message string       `json:"message,omitempty"`
	Host    *PublishHost `json:"host,omitempty"`
	Guest   uint16       `json:"guest_port,omitempty"`
}

// monotonicNS reads CLOCK_MONOTONIC, which other processes of this machine can compare with theirs.
func monotonicNS() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0
	}
	return ts.Nano()
}

// eventWriter writes events as JSON lines, each with one write. A nil one discards. Nobody reading is no error: events inform, they
// do not steer.
type eventWriter struct {
	mu sync.Mutex
	f  *os.File
}

func (w *eventWriter) emit(e Event) {
	if w == nil || w.f == nil {
		return
	}
	if e.TimeNS == 0 {
		e.TimeNS = monotonicNS()
	}
	line, err := json.Marshal(e)
	if err != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	_, _ = w.f.Write(append(line, '\n'))
}
