package sandbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"

	"gvx.dev/gvx/native/internal/control"
	"gvx.dev/gvx/native/internal/image"
	"gvx.dev/gvx/native/internal/lockdown"
	"gvx.dev/gvx/native/internal/netnat"
)

// ExitInfrastructure is the exit code of a run that failed for a reason other than the guest's, as docker's is.
const ExitInfrastructure = 125

// LogName is the Sentry's log in the runtime directory.
const LogName = "sentry.log"

// forwarded are the signals that go to the guest's init.
var forwarded = []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH}

// forcefulSignals is how many of SIGINT and SIGTERM make the guest die at once, as docker's CLI counts them.
const forcefulSignals = 3

// failure is an error of the infrastructure with its kind for the events stream.
type failure struct {
	kind string
	err  error
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

func failf(kind, format string, args ...any) error {
	return &failure{kind, fmt.Errorf(format, args...)}
}

// supervisor is the state of `gvx-sentry run`.
type supervisor struct {
	ep     *Episode
	events *eventWriter

	// mu guards what the goroutines below share with the main one.
	mu sync.Mutex
	// listeners are the published ports.
	listeners []net.Listener
	// sockets are the paths to unlink.
	sockets []string
	// sentry is the boot process, 0 before it is started. It leads a session and process group of its own.
	sentry int
	// parent is the process that started us, usually the launcher.
	parent int
	// records are the lock records that the launcher left beside the volumes.
	records []string
	// aborted is set once the episode is being killed; nothing is started from then on.
	aborted bool
	// intended is set when the launcher said that it will cut the lifeline: then nobody need be told.
	intended bool

	// started is closed when the guest runs.
	started chan struct{}
	client  *control.Client
	log     *boundedLog
	stdio   *stdio
	debug   bool
}

// bootReport is what the boot process tells by its status socket: "started", "exit" or "error" events.
type bootReport struct {
	exit *Event
	err  *Event
}

// Supervise runs the episode whose document is read from specFD and returns the process's exit code. It must be called
// from the main goroutine, locked to the main thread: the Sentry dies with the *thread* that started it.
func Supervise(specFD int) int {
	t0 := monotonicNS()
	s := &supervisor{parent: os.Getppid(), started: make(chan struct{}), debug: os.Getenv("GVX_DEBUG") != ""}
	if !s.debug {
		// gVisor's packages log to stderr, which is the guest's: a signal that meets a guest just ended would leave a line there.
		logTo(io.Discard, log.Warning)
	}
	code, err := s.run(specFD, t0)
	s.removeSockets()
	s.removeRuntimeDir()
	if err != nil {
		kind := KindSetup
		var f *failure
		if errors.As(err, &f) {
			kind = f.kind
		}
		s.events.emit(Event{Event: EventError, Kind: kind, Message: err.Error()})
		fmt.Fprintf(os.Stderr, "gvx-sentry: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "))
		return ExitInfrastructure
	}
	return code
}

func (s *supervisor) run(specFD int, t0 int64) (int, error) {
	if err := lockdown.Process(); err != nil {
		return 0, err
	}
	// Orphans of the Sentry come to us instead of to init, so that "all gone" can be waited for.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("becoming a subreaper: %w", err)
	}
	// Whatever else the launcher left open is not for the Sentry. Kernels before 5.11 cannot: there, it is for the launcher to see to.
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	specFile := os.NewFile(uintptr(specFD), "episode")
	if specFile == nil {
		return 0, failf(KindSpec, "--spec-fd %d is no descriptor", specFD)
	}
	ep, err := ParseEpisode(specFile)
	_ = specFile.Close()
	if err != nil {
		return 0, failf(KindSpec, "%w", err)
	}
	s.ep = ep
	if err := ep.adoptDescriptors(); err != nil {
		return 0, failf(KindSpec, "%w", err)
	}
	s.records = ep.lockRecords()
	if ep.EventsFD != nil {
		s.events = &eventWriter{f: os.NewFile(uintptr(*ep.EventsFD), "events")}
	}
	// Signals are held from here on and delivered when the guest runs. The event says so: who wants to send one waits for it.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded...)
	s.events.emit(Event{Event: EventSupervisor, TimeNS: t0, PID: os.Getpid()})
	// A caught SIGPIPE turns a closed stderr or events stream into EPIPE; an ignored one would be inherited.
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)
	if ep.LifelineFD != nil {
		go s.watchLifeline(os.NewFile(uintptr(*ep.LifelineFD), "lifeline"))
	}

	if err := s.checkRuntimeDir(); err != nil {
		return 0, err
	}
	if err := image.Check(ep.Rootfs.FD); err != nil {
		return 0, failf(KindSpec, "rootfs.fd: %w", err)
	}
	// Bad addresses and paths are found before a Sentry is started for nothing.
	for i := range ep.Network.Publish {
		if err := s.listen(&ep.Network.Publish[i]); err != nil {
			return 0, err
		}
	}
	var policy *netnat.Policy
	cable := [2]int{-1, -1}
	if ep.Network.Mode == NetworkNAT {
		if policy, err = netnat.NewPolicy(ep.Network.Allow); err != nil {
			return 0, failf(KindSpec, "%w", err)
		}
		if cable[0], cable[1], err = netnat.Cable(); err != nil {
			return 0, err
		}
	}
	status, err := s.startSentry(cable[1])
	if err != nil {
		return 0, err
	}
	// The network comes up while the Sentry boots: frames wait in the socketpair.
	var nat *netnat.NAT
	if cable[0] >= 0 {
		if nat, err = netnat.New(cable[0], policy); err != nil {
			s.abort()
			s.reap()
			return 0, err
		}
		for i, l := range s.listeners {
			go func() { _ = nat.Publish(l, ep.Network.Publish[i].GuestPort) }()
		}
	}
	reports := make(chan bootReport, 1)
	go func() { reports <- s.readStatus(status) }()
	go s.forwardSignals(signals)

	ws := s.reap()
	s.stdio.drain()
	// Every process that could hold the status socket is gone: it has ended.
	return s.result(ws, <-reports)
}

// result turns the Sentry's last words and its wait status into the run's exit code.
func (s *supervisor) result(ws unix.WaitStatus, r bootReport) (int, error) {
	if r.exit != nil && r.err == nil {
		s.removeSockets() // Before the event: who reads it may look for residues.
		s.events.emit(*r.exit)
		return *r.exit.Code, nil
	}
	if r.err != nil {
		return 0, failf(r.err.Kind, "%s", r.err.Message)
	}
	s.mu.Lock()
	aborted, intended := s.aborted, s.intended
	s.mu.Unlock()
	if aborted && intended {
		signal := int(unix.SIGKILL)
		code := 128 + signal
		s.removeSockets()
		s.events.emit(Event{Event: EventExit, Code: &code, Signal: &signal})
		return code, nil
	}
	if aborted {
		return 0, failf(KindLifeline, "the launcher has gone: the episode was killed")
	}
	how := fmt.Sprintf("exit status %d", ws.ExitStatus())
	if ws.Signaled() {
		how = fmt.Sprintf("signal %d (%s)", ws.Signal(), ws.Signal())
	}
	msg := fmt.Sprintf("the Sentry died with %s", how)
	if cause := s.logTail(); cause != "" {
		msg += ": " + cause
	}
	return 0, failf(KindSentry, "%s", msg)
}

// adoptDescriptors checks that every descriptor of the document is open, and keeps them from leaking into children.
func (e *Episode) adoptDescriptors() error {
	check := func(field string, fd int) error {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			return &SpecError{field, fmt.Sprintf("descriptor %d is not open", fd)}
		}
		return nil
	}
	if err := check("rootfs.fd", e.Rootfs.FD); err != nil {
		return err
	}
	for i, m := range e.Mounts {
		if m.FD != nil {
			if err := check(fmt.Sprintf("mounts[%d].fd", i), *m.FD); err != nil {
				return err
			}
		}
		if m.BaseFD != nil {
			if err := check(fmt.Sprintf("mounts[%d].base_fd", i), *m.BaseFD); err != nil {
				return err
			}
		}
	}
	if e.LifelineFD != nil {
		if err := check("lifeline_fd", *e.LifelineFD); err != nil {
			return err
		}
	}
	if e.EventsFD != nil {
		return check("events_fd", *e.EventsFD)
	}
	return nil
}

// checkRuntimeDir refuses a runtime directory that others can enter: the control socket in it owns the guest.
func (s *supervisor) checkRuntimeDir() error {
	st, err := os.Stat(s.ep.RuntimeDir)
	switch {
	case err != nil:
		return failf(KindSpec, "runtime_dir: %w", err)
	case !st.IsDir():
		return failf(KindSpec, "runtime_dir %s is no directory", s.ep.RuntimeDir)
	case st.Mode().Perm()&0o077 != 0:
		return failf(KindSpec, "runtime_dir %s has mode %04o, others can enter it: make it 0700", s.ep.RuntimeDir, st.Mode().Perm())
	}
	return nil
}

// listen opens the host's end of a published port.
func (s *supervisor) listen(p *Publish) error {
	var l net.Listener
	var err error
	switch p.Host.Kind {
	case HostUnix:
		l, err = listenUnix(p.Host.Path)
	default:
		l, err = net.Listen("tcp", net.JoinHostPort(p.Host.Address, strconv.Itoa(int(p.Host.Port))))
	}
	if err != nil {
		return failf(KindSetup, "publishing guest port %d: %w", p.GuestPort, err)
	}
	host := p.Host
	s.mu.Lock()
	s.listeners = append(s.listeners, l)
	if host.Kind == HostUnix {
		s.sockets = append(s.sockets, host.Path)
	} else {
		host.Port = uint16(l.Addr().(*net.TCPAddr).Port)
	}
	aborted := s.aborted
	s.mu.Unlock()
	if aborted { // The lifeline ended between the bind and the note of it.
		s.removeSockets()
	}
	s.events.emit(Event{Event: EventPublished, Host: &host, Guest: p.GuestPort})
	return nil
}

// listenUnix binds a socket that only this user can connect to. A socket file left by a run that was killed is replaced;
// one that something listens on, or a file of another kind, is not.
func listenUnix(path string) (net.Listener, error) {
	if st, err := os.Lstat(path); err == nil {
		if st.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("%s exists and is no socket", path)
		}
		if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
			_ = c.Close()
			return nil, fmt.Errorf("%s is in use by another process", path)
		} else if !errors.Is(err, unix.ECONNREFUSED) {
			return nil, fmt.Errorf("%s exists: %w", path, err)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("stale socket: %w", err)
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // removeSockets does, in one place.
	if err := os.Chmod(path, 0o600); err != nil {
		_ = l.Close()
		_ = os.Remove(path)
		return nil, err
	}
	return l, nil
}

// removeSockets closes and unlinks everything that the supervisor made in the file system. It may be called repeatedly.
func (s *supervisor) removeSockets() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.listeners {
		_ = l.Close()
	}
	for _, p := range s.sockets {
		_ = os.Remove(p)
	}
	s.listeners, s.sockets = nil, nil
	if s.ep != nil {
		_ = control.Remove(s.ep.RuntimeDir)
	}
}

// removeRuntimeDir removes the private directory with the log when the launcher, whose it is, has gone: nobody else would.
// The directory above is the launcher's too and goes with the last episode in it.
func (s *supervisor) removeRuntimeDir() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.aborted || s.ep == nil {
		return
	}
	if !s.intended {
		for _, name := range s.records {
			s.removeDeadRecord(name)
		}
	}
	_ = os.RemoveAll(s.ep.RuntimeDir)
	if above := filepath.Dir(s.ep.RuntimeDir); strings.HasPrefix(filepath.Base(above), "gvx") {
		_ = os.Remove(above) // Fails, as it should, while it is not empty.
	}
}

// lockRecords returns the names of the records beside the volumes (ext4lite/blockdev.py writes them: a JSON object with
// the pid of the launcher, for error messages).
func (e *Episode) lockRecords() []string {
	var names []string
	for _, m := range e.Mounts {
		if m.FD == nil {
			continue
		}
		if image, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", *m.FD)); err == nil && filepath.IsAbs(image) {
			names = append(names, image+".lock")
		}
	}
	return names
}

// removeDeadRecord removes a lock record whose process is gone.
func (s *supervisor) removeDeadRecord(name string) {
	b, err := os.ReadFile(name)
	if err != nil {
		return
	}
	var record struct {
		PID int `json:"pid"`
	}
	if json.Unmarshal(b, &record) == nil && record.PID > 0 && s.isDead(record.PID) {
		_ = os.Remove(name)
	}
}

// isDead tells whether a process has ended. Our parent has when we have another one: nobody may have waited for it yet. A
// dying process closes its files, the lifeline too, a little before its children move.
func (s *supervisor) isDead(pid int) bool {
	for range 20 {
		if pid == s.parent && os.Getppid() != s.parent || errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			return true
		}
		time.Sleep(5 * time.Millisecond)
	}
	return false
}

// startSentry starts the boot process and returns our end of its status socket.
func (s *supervisor) startSentry(cable int) (*os.File, error) {
	sock, err := control.Listen(s.ep.RuntimeDir)
	if err != nil {
		return nil, err
	}
	defer sock.Close()
	mine, err := sock.Connect()
	if err != nil {
		return nil, err
	}
	if s.client, err = control.NewClient(mine); err != nil {
		return nil, err
	}
	its, err := sock.Connect()
	if err != nil {
		return nil, err
	}
	defer unix.Close(its)
	st, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("status socket: %w", err)
	}
	status := os.NewFile(uintptr(st[0]), "status")
	defer unix.Close(st[1])
	if s.log, err = newBoundedLog(filepath.Join(s.ep.RuntimeDir, LogName)); err != nil {
		return nil, err
	}
	defer s.log.handedOver()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()

	if s.stdio, err = newStdio(int(null.Fd())); err != nil {
		return nil, err
	}
	defer s.stdio.handedOver()
	// The child's descriptor table: what is written into cfg are the child's numbers.
	logFD := s.log.writer.Fd()
	if s.debug {
		logFD = 2
	}
	files := []uintptr{null.Fd(), logFD, logFD, 0 /* the configuration, below */}
	pass := func(fd int) int {
		files = append(files, uintptr(fd))
		return len(files) - 1
	}
	cfg := bootConfig{
		Episode: s.ep, ListenFD: pass(sock.FD), ClientFD: pass(its), StatusFD: pass(st[1]), NetworkFD: -1,
		RootfsFD: pass(s.ep.Rootfs.FD), StdioFDs: [3]int{pass(s.stdio.fds[0]), pass(s.stdio.fds[1]), pass(s.stdio.fds[2])}, Debug: s.debug,
	}
	if dir, err := os.UserCacheDir(); err == nil {
		cfg.CacheDir = filepath.Join(dir, "gvx")
	}
	if cable >= 0 {
		cfg.NetworkFD = pass(cable)
		defer unix.Close(cable)
	}
	passed := func(fd *int) int {
		if fd == nil {
			return -1
		}
		return pass(*fd)
	}
	for _, m := range s.ep.Mounts {
		cfg.VolumeFDs = append(cfg.VolumeFDs, passed(m.FD))
		cfg.BaseFDs = append(cfg.BaseFDs, passed(m.BaseFD))
	}
	if len(files) > maxPassedFDs {
		return nil, failf(KindSpec, "the episode has too many descriptors (%d)", len(files))
	}
	cfgFile, err := configFile(&cfg)
	if err != nil {
		return nil, err
	}
	defer cfgFile.Close()
	files[bootConfigFD] = cfgFile.Fd()

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.aborted {
		return nil, failf(KindLifeline, "the launcher has gone: the episode was not started")
	}
	// /proc/self/exe is this very binary, also when its file has been replaced since.
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"gvx-sentry", "boot", s.ep.ID}, &syscall.ProcAttr{
		Files: files,
		Env:   bootEnviron(),
		// A session of its own: the terminal's ^C comes to us alone and is forwarded, and reading from a terminal that is not
		// its controlling one cannot stop the Sentry. The group is what abort kills.
		Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
	})
	if err != nil {
		return nil, fmt.Errorf("starting the Sentry: %w", err)
	}
	s.sentry = pid
	// The volumes are the Sentry's now; holding them here would hold their locks.
	for _, m := range s.ep.Mounts {
		for _, fd := range []*int{m.FD, m.BaseFD} {
			if fd != nil {
				_ = unix.Close(*fd)
			}
		}
	}
	_ = unix.Close(s.ep.Rootfs.FD)
	runtime.KeepAlive(cfgFile)
	return status, nil
}

// bootEnviron is the Sentry's own environment: nothing of the launcher's gets near a guest. The garbage collector is off until
// the guest runs (Boot turns it on): a start allocates a few MB, and each collection in it costs a millisecond.
func bootEnviron() []string {
	env := []string{"GOGC=off"}
	for _, name := range []string{"GODEBUG", "GOTRACEBACK"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// configFile puts the boot configuration into an anonymous file: unlike a pipe, it needs nobody to write while it is read.
func configFile(cfg *bootConfig) (*os.File, error) {
	b, err := json.Marshal(cfg)
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("gvx-boot", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("configuration of the Sentry: %w", err)
	}
	f := os.NewFile(uintptr(fd), "gvx-boot")
	if _, err := f.Write(b); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("configuration of the Sentry: %w", err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("configuration of the Sentry: %w", err)
	}
	return f, nil
}

// watchLifeline kills the episode when the launcher's end of the pipe is closed, by intent (a byte before it says so) or by its death.
func (s *supervisor) watchLifeline(f *os.File) {
	buf := make([]byte, 64)
	for {
		n, err := f.Read(buf)
		if n > 0 {
			s.mu.Lock()
			s.intended = true
			s.mu.Unlock()
			continue
		}
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		s.abort()
		return
	}
}

// abort kills the episode without asking the guest. The kill comes first, since the Sentry's end takes longest.
func (s *supervisor) abort() {
	s.mu.Lock()
	s.aborted = true
	pid := s.sentry
	s.mu.Unlock()
	if pid > 0 {
		_ = unix.Kill(-pid, unix.SIGKILL)
	}
	s.removeSockets()
}

// reap waits until the Sentry and every process descended from it is gone, and returns the Sentry's status.
func (s *supervisor) reap() unix.WaitStatus {
	var sentry unix.WaitStatus
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil: // ECHILD: nobody is left.
			return sentry
		}
		if pid == s.sentry {
			sentry = ws
			// The stubs that run guest code die with the Sentry; this is for any that has not heard of it.
			_ = unix.Kill(-pid, unix.SIGKILL)
		}
	}
}

// readStatus relays what the boot process reports until its end of the socket is closed.
func (s *supervisor) readStatus(f *os.File) bootReport {
	var r bootReport
	dec := json.NewDecoder(f)
	for {
		var e Event
		if err := dec.Decode(&e); err != nil {
			return r
		}
		switch e.Event {
		case EventStarted:
			s.mu.Lock()
			e.PID = s.sentry
			s.mu.Unlock()
			s.events.emit(e)
			close(s.started)
		case EventExit:
			r.exit = &e
		case EventError:
			r.err = &e
		}
	}
}

// forwardSignals passes signals on to the guest's init. An init that does not end within the grace period after the first
// SIGTERM, or that gets a third SIGINT or SIGTERM, is killed: by a signal inside the guest, so that volumes are still closed cleanly.
func (s *supervisor) forwardSignals(signals <-chan os.Signal) {
	<-s.started
	requests := 0
	var grace <-chan time.Time
	for {
		var sig unix.Signal
		select {
		case got := <-signals:
			sig = got.(unix.Signal)
		case <-grace:
			sig = unix.SIGKILL
		}
		if sig == unix.SIGTERM || sig == unix.SIGINT {
			if requests++; requests >= forcefulSignals {
				sig = unix.SIGKILL
			}
		}
		if sig == unix.SIGTERM && grace == nil && *s.ep.StopGraceMS > 0 {
			grace = time.After(time.Duration(*s.ep.StopGraceMS) * time.Millisecond)
		}
		// An error means that the guest has just ended.
		_ = s.client.Signal(s.ep.ID, sig)
	}
}

// isLogLine tells whether a line is a message of gVisor's: those begin with level, month and day ("W1129 ").
func isLogLine(line string) bool {
	level, rest, _ := strings.Cut(line, " ")
	_, err := strconv.ParseUint(strings.TrimLeft(level, "DIW"), 10, 32)
	return rest != "" && len(level) == 5 && strings.ContainsAny(level[:1], "DIW") && err == nil
}

// logTail returns the line of the Sentry's log that best says why it died: a panic's or fatal error's first line, else the last one
// that is no message of gVisor's, which are about other things.
func (s *supervisor) logTail() string {
	if s.log == nil {
		return ""
	}
	buf, err := s.log.tail(256 << 10)
	if err != nil {
		return ""
	}
	last := ""
	for line := range bytes.Lines(buf) {
		text := strings.TrimSpace(string(line))
		for _, mark := range []string{"panic: ", "fatal error: ", "FATAL ERROR: "} {
			if strings.HasPrefix(text, mark) {
				return text
			}
		}
		if text != "" && !isLogLine(text) {
			last = text
		}
	}
	return last
}
