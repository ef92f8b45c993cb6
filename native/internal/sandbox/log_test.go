package sandbox

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/log"
)

// early is a logger as gVisor's packages have them: made when the program starts.
var early = log.BasicRateLimitedLogger(time.Hour)

func TestLogToHasLoggersMadeEarlier(t *testing.T) {
	was, level := log.Log().Emitter, log.Log().Level
	defer func() { log.Log().Emitter, log.Log().Level = was, level }()
	var out bytes.Buffer
	logTo(&out, log.Warning)
	log.Infof("not this")
	log.Warningf("from everywhere")
	if got := out.String(); !strings.Contains(got, "from everywhere") || strings.Contains(got, "not this") {
		t.Errorf("the log has %q", got)
	}
	logTo(&out, log.Info)
	early.Infof("from early")
	if !strings.Contains(out.String(), "from early") {
		t.Errorf("the log has %q: a logger made at start goes elsewhere", out.String())
	}
}

// A log is bounded, whatever is written, and has the last lines.
func TestBoundedLog(t *testing.T) {
	name := filepath.Join(t.TempDir(), LogName)
	l, err := newBoundedLog(name)
	if err != nil {
		t.Fatal(err)
	}
	line := bytes.Repeat([]byte("x"), 999)
	for i := range 3 * maxLogBytes / 1000 {
		if _, err := fmt.Fprintf(l.writer, "%s\n", line); err != nil {
			t.Fatalf("line %d: %v", i, err)
		}
	}
	if _, err := l.writer.WriteString("the last words\n"); err != nil {
		t.Fatal(err)
	}
	l.handedOver()
	l.handedOver()
	end, err := l.tail(2000)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasSuffix(end, []byte("x\nthe last words\n")) {
		t.Errorf("the log ends with %q", end[max(0, len(end)-40):])
	}
	st, err := os.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	if st.Size() > maxLogBytes || st.Size() < 1000 {
		t.Errorf("the log has %d bytes, the bound is %d", st.Size(), maxLogBytes)
	}
}

func TestIsLogLine(t *testing.T) {
	for line, want := range map[string]bool{
		"W1129 20:01:37.425316    3190 loader.go:24] from everywhere": true,
		"panic: something":                     false,
		"W1129":                                false,
		"Wabcd what":                           false,
		"1129 what":                            false,
		"runtime: out of memory: cannot alloc": false,
	} {
		if isLogLine(line) != want {
			t.Errorf("isLogLine(%q) is not %v", line, want)
		}
	}
}
