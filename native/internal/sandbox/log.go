package sandbox

import (
	"fmt"
	"io"
	"os"

	"gvisor.dev/gvisor/pkg/log"
)

// maxLogBytes bounds the Sentry's log: a guest can make the Sentry complain as often as it likes, and the runtime directory
// is often in memory.
const maxLogBytes = 4 << 20

// logTo sends what gVisor's packages log to w. They keep copies of the logger that was there when they were initialized (the rate-limited ones
// do), so that one is changed: with log.SetTarget, a frame of the guest's could still put a line on its own stderr. Call it before
// anything is logged.
func logTo(w io.Writer, level log.Level) {
	logger := log.Log()
	logger.Emitter = log.GoogleEmitter{Writer: &log.Writer{Next: w}}
	logger.SetLevel(level)
}

// boundedLog is a file behind a pipe. Once it is full it begins anew, so that the last lines are always there.
type boundedLog struct {
	file *os.File
	// writer is the pipe's end for the Sentry, nil once it was handed over.
	writer *os.File
	// done is closed when every writer is gone and all is in the file.
	done chan struct{}
}

func newBoundedLog(name string) (*boundedLog, error) {
	file, err := os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("log of the Sentry: %w", err)
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("log of the Sentry: %w", err)
	}
	l := &boundedLog{file: file, writer: writer, done: make(chan struct{})}
	go l.copy(reader)
	return l, nil
}

// copy ends when every writer has closed the pipe. A full disk loses lines, it does not stop the Sentry.
func (l *boundedLog) copy(reader *os.File) {
	defer close(l.done)
	defer reader.Close()
	buf := make([]byte, 32<<10)
	size := 0
	for {
		n, err := reader.Read(buf)
		if size+n > maxLogBytes && l.file.Truncate(0) == nil {
			size, _ = l.file.WriteString("(older lines were dropped)\n")
		}
		if n > 0 && size+n <= maxLogBytes {
			written, _ := l.file.Write(buf[:n])
			size += written
		}
		if err != nil {
			return
		}
	}
}

// handedOver closes our copy of what the Sentry has now.
func (l *boundedLog) handedOver() {
	if l.writer != nil {
		_ = l.writer.Close()
		l.writer = nil
	}
}

// tail returns the last bytes of the log, at most most. It waits for what the Sentry wrote last, so it may be called only
// when the Sentry is gone.
func (l *boundedLog) tail(most int64) ([]byte, error) {
	<-l.done
	st, err := l.file.Stat()
	if err != nil {
		return nil, err
	}
	size := min(st.Size(), most)
	return io.ReadAll(io.NewSectionReader(l.file, st.Size()-size, size))
}
