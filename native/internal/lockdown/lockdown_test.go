package lockdown

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestMain lets the test binary be the process that locks itself down: it cannot be undone in the tests' own.
func TestMain(m *testing.M) {
	if os.Getenv("GVX_LOCKDOWN_CHILD") == "" {
		os.Exit(m.Run())
	}
	if err := Process(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	// A grandchild shows what is inherited through exec, also by uid 0.
	out, err := exec.Command("cat", "/proc/self/status", "/proc/self/limits").CombinedOutput()
	fmt.Print(string(out))
	if err != nil {
		os.Exit(1)
	}
}

func TestProcessIsInherited(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "GVX_LOCKDOWN_CHILD=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("child: %v\n%s", err, out)
	}
	status := map[string]string{}
	for line := range strings.SplitSeq(string(out), "\n") {
		if k, v, ok := strings.Cut(line, ":"); ok {
			status[k] = strings.TrimSpace(v)
		}
	}
	if got := status["NoNewPrivs"]; got != "1" {
		t.Errorf("NoNewPrivs is %q, not 1", got)
	}
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapAmb"} {
		if got := status[set]; got != "0000000000000000" {
			t.Errorf("%s is %q: capabilities are left", set, got)
		}
	}
	for line := range strings.SplitSeq(string(out), "\n") {
		f := strings.Fields(line)
		if strings.HasPrefix(line, "Max open files") && f[3] != f[4] {
			t.Errorf("soft limit of open files %s is below the hard one %s", f[3], f[4])
		}
		if strings.HasPrefix(line, "Max core file size") && f[4] != "0" {
			t.Errorf("core dumps of %s are possible", f[4])
		}
	}
}
