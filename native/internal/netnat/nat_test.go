package netnat

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

// newGuest joins a NAT with a second stack set up as the Sentry sets up the guest's.
func newGuest(t *testing.T, allow ...string) (*stack.Stack, *NAT) {
	t.Helper()
	ours, guests, err := Cable()
	if err != nil {
		t.Fatal(err)
	}
	policy, err := NewPolicy(allow)
	if err != nil {
		t.Fatal(err)
	}
	n, err := New(ours, policy)
	if err != nil {
		t.Fatal(err)
	}
	ep, err := fdbased.New(&fdbased.Options{
		FDs: []int{guests}, MTU: MTU, EthernetHeader: true, Address: tcpip.LinkAddress(GuestMAC), PacketDispatchMode: fdbased.RecvMMsg,
	})
	if err != nil {
		t.Fatal(err)
	}
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
	})
	if e := s.CreateNIC(nicID, ep); e != nil {
		t.Fatal(e)
	}
	addr := tcpip.AddressWithPrefix{Address: tcpip.AddrFrom4(Guest.As4()), PrefixLen: PrefixLen}
	if e := s.AddProtocolAddress(nicID, tcpip.ProtocolAddress{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: addr}, stack.AddressProperties{}); e != nil {
		t.Fatal(e)
	}
	s.SetRouteTable([]tcpip.Route{
		{Destination: addr.Subnet(), NIC: nicID},
		{Destination: tcpip.AddressWithPrefix{Address: tcpip.AddrFrom4([4]byte{}), PrefixLen: 0}.Subnet(), Gateway: tcpip.AddrFrom4(Gateway.As4()), NIC: nicID},
	})
	t.Cleanup(func() {
		s.Close()
		n.Close()
		// Shutting the cable down ends both ends' dispatch loops.
		_ = unix.Shutdown(ours, unix.SHUT_RDWR)
	})
	return s, n
}

func full(a netip.Addr, port int) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: nicID, Addr: tcpip.AddrFrom4(a.As4()), Port: uint16(port)}
}

func dialGuest(t *testing.T, s *stack.Stack, a netip.Addr, port int) (*gonet.TCPConn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	return gonet.DialContextTCP(ctx, s, full(a, port), ipv4.ProtocolNumber)
}

// echoServer answers each TCP connection with what it sent, in capitals, after the client's half-close.
func echoServer(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go serveUpper(l)
	return l.Addr().(*net.TCPAddr).Port
}

func serveUpper(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			in, err := io.ReadAll(c)
			if err == nil {
				_, _ = c.Write(bytes.ToUpper(in))
			}
		}()
	}
}

// exchange sends a message, half-closes and reads to the end.
func exchange(c interface {
	net.Conn
	CloseWrite() error
}, msg []byte) ([]byte, error) {
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return nil, err
	}
	if _, err := c.Write(msg); err != nil {
		return nil, fmt.Errorf("write: %w", err)
	}
	if err := c.CloseWrite(); err != nil {
		return nil, fmt.Errorf("half-close: %w", err)
	}
	return io.ReadAll(c)
}

func TestTCPOutPassesHalfCloses(t *testing.T) {
	port := echoServer(t)
	guest, _ := newGuest(t, fmt.Sprintf("127.0.0.1:%d", port))
	// 4 MB: more than any buffer on the way.
	for _, msg := range [][]byte{[]byte("hello"), bytes.Repeat([]byte("0123456789abcdef"), 256<<10)} {
		c, err := dialGuest(t, guest, Gateway, port)
		if err != nil {
			t.Fatal(err)
		}
		got, err := exchange(c, msg)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, bytes.ToUpper(msg)) {
			t.Fatalf("%d bytes came back, not the %d sent in capitals", len(got), len(msg))
		}
	}
}

func TestPolicyRefusesByDefault(t *testing.T) {
	port := echoServer(t)
	guest, _ := newGuest(t)
	for _, a := range []netip.Addr{Gateway, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("169.254.169.254"), netip.MustParseAddr("192.168.1.1")} {
		start := time.Now()
		c, err := dialGuest(t, guest, a, port)
		if err == nil {
			_ = c.Close()
			t.Errorf("%s:%d was reached", a, port)
		} else if !strings.Contains(err.Error(), "refused") && !a.IsLoopback() {
			// The guest's own stack keeps its loopback to itself; all else must be a reset, not a silence.
			t.Errorf("%s: %v, not a refusal", a, err)
		}
		if d := time.Since(start); d > 2*time.Second && !a.IsLoopback() {
			t.Errorf("%s was refused after %v only", a, d)
		}
	}
}

func TestClosedPortIsRefused(t *testing.T) {
	guest, _ := newGuest(t, "127.0.0.0/8")
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	_ = l.Close()
	if _, err := dialGuest(t, guest, Gateway, port); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Fatalf("connecting to a closed port: %v", err)
	}
}

func TestUDPOut(t *testing.T) {
	server, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		buf := make([]byte, 65536)
		for {
			n, from, err := server.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = server.WriteTo(bytes.ToUpper(buf[:n]), from)
		}
	}()
	port := server.LocalAddr().(*net.UDPAddr).Port
	guest, _ := newGuest(t, fmt.Sprintf("127.0.0.1:%d", port))
	to := full(Gateway, port)
	c, err := gonet.DialUDP(guest, nil, &to, ipv4.ProtocolNumber)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, msg := range []string{"one", "two", strings.Repeat("x", 9000)} {
		if _, err := c.Write([]byte(msg)); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		buf := make([]byte, 65536)
		n, err := c.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		if string(buf[:n]) != strings.ToUpper(msg) {
			t.Fatalf("%q came back for %q", buf[:n], msg)
		}
	}
}

func TestUDPDenied(t *testing.T) {
	guest, _ := newGuest(t)
	to := full(Gateway, 9)
	c, err := gonet.DialUDP(guest, nil, &to, ipv4.ProtocolNumber)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	for range 30 {
		// A reader that waits is not woken by an ICMP error, only a new one sees it: so is gonet.
		_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err = c.Read(make([]byte, 10)); err != nil && strings.Contains(err.Error(), "refused") {
			return
		}
	}
	t.Fatalf("a denied datagram: %v, not an ICMP refusal", err)
}

// publish serves a unix socket with the guest's port and returns its path.
func publish(t *testing.T, n *NAT, port uint16) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() { _ = n.Publish(l, port) }()
	return path
}

func TestPublish(t *testing.T) {
	guest, n := newGuest(t)
	path := publish(t, n, 2375)
	// Nobody listens yet: the connection is closed at once.
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(3 * time.Second))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Fatalf("no listener in the guest: %v, not EOF", err)
	}
	_ = c.Close()

	l, err := gonet.ListenTCP(guest, full(Guest, 2375), ipv4.ProtocolNumber)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go serveUpper(l)
	msg := bytes.Repeat([]byte("attach "), 100_000)
	for range 3 {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		got, err := exchange(c.(*net.UnixConn), msg)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, bytes.ToUpper(msg)) {
			t.Fatalf("%d bytes came back for %d", len(got), len(msg))
		}
	}
}

// dnsQuestion is a question for example.com, type A, with an EDNS record behind it.
func dnsQuestion() []byte {
	q := []byte{0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1}
	q = append(q, "\x07example\x03com\x00\x00\x01\x00\x01"...)
	return append(q, "\x00\x00\x29\x10\x00\x00\x00\x00\x00\x00\x00"...)
}

func TestDNSFailsAtOnceWithoutServers(t *testing.T) {
	guest, n := newGuest(t)
	n.resolver.servers = func() []netip.AddrPort { return nil }
	q := dnsQuestion()
	want := append([]byte(nil), q[:len(q)-11]...)
	want[2], want[3], want[11] = 0x81, 0x82, 0

	to := full(DNS, dnsPort)
	c, err := gonet.DialUDP(guest, nil, &to, ipv4.ProtocolNumber)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(q); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(3 * time.Second))
	buf := make([]byte, 512)
	k, err := c.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(buf[:k], want) {
		t.Errorf("UDP answer %x, not %x", buf[:k], want)
	}

	tc, err := dialGuest(t, guest, DNS, dnsPort)
	if err != nil {
		t.Fatal(err)
	}
	got, err := exchange(tc, append(binary.BigEndian.AppendUint16(nil, uint16(len(q))), q...))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) < 2 || !bytes.Equal(got[2:], want) {
		t.Errorf("TCP answer %x, not %x", got, want)
	}
}

func TestDNSForwards(t *testing.T) {
	server, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		buf := make([]byte, 512)
		for {
			n, from, err := server.ReadFrom(buf)
			if err != nil {
				return
			}
			answer := append([]byte(nil), buf[:n]...)
			answer[2] |= 0x80
			_, _ = server.WriteTo(append(answer, "answer"...), from)
		}
	}()
	guest, n := newGuest(t)
	silent := netip.MustParseAddrPort("127.0.0.1:1") // Nobody there: the next one is asked.
	n.resolver.servers = func() []netip.AddrPort {
		return []netip.AddrPort{silent, netip.MustParseAddrPort(server.LocalAddr().String())}
	}
	to := full(DNS, dnsPort)
	c, err := gonet.DialUDP(guest, nil, &to, ipv4.ProtocolNumber)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(dnsQuestion()); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	buf := make([]byte, 512)
	k, err := c.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasSuffix(buf[:k], []byte("answer")) {
		t.Fatalf("answer %q is not the server's", buf[:k])
	}
}

// A guest that floods a server which does not answer holds a bounded number of sockets.
func TestDNSFloodIsBounded(t *testing.T) {
	silent, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	guest, n := newGuest(t)
	n.resolver.servers = func() []netip.AddrPort {
		return []netip.AddrPort{netip.MustParseAddrPort(silent.LocalAddr().String())}
	}
	before := descriptors(t)
	to := full(DNS, dnsPort)
	c, err := gonet.DialUDP(guest, nil, &to, ipv4.ProtocolNumber)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	most := 0
	for i := range 20 * dnsInFlight {
		if _, err := c.Write(dnsQuestion()); err != nil {
			t.Fatal(err)
		}
		if i%dnsInFlight == 0 {
			time.Sleep(10 * time.Millisecond) // for the frames to be taken
			most = max(most, descriptors(t)-before)
		}
	}
	if most < dnsInFlight/2 || most > dnsInFlight+16 {
		t.Errorf("%d sockets for a flood of questions, the bound is %d", most, dnsInFlight)
	}
}

// More connections than the bound are refused at once, and there is room again when one has ended.
func TestTCPFlowsAreBounded(t *testing.T) {
	port := echoServer(t)
	guest, n := newGuest(t, fmt.Sprintf("127.0.0.1:%d", port))
	n.tcpFlows = make(chan struct{}, 2)
	var open []*gonet.TCPConn
	for range 2 {
		c, err := dialGuest(t, guest, Gateway, port)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	defer open[1].Close()
	if c, err := dialGuest(t, guest, Gateway, port); err == nil {
		_ = c.Close()
		t.Fatal("a third connection was made, the bound is 2")
	}
	if got, err := exchange(open[0], []byte("x")); err != nil || string(got) != "X" {
		t.Fatalf("%q, %v", got, err)
	}
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		c, err := dialGuest(t, guest, Gateway, port)
		if err == nil {
			_ = c.Close()
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func TestParseResolvConf(t *testing.T) {
	in := "# x\nsearch a b\nnameserver 10.0.0.1\nnameserver bad\n nameserver fe80::1\noptions ndots:1\nnameserver 8.8.8.8\nnameserver 9.9.9.9\n"
	got := fmt.Sprint(parseResolvConf(strings.NewReader(in)))
	if want := "[10.0.0.1:53 [fe80::1]:53 8.8.8.8:53]"; got != want {
		t.Errorf("%s, not %s", got, want)
	}
}

func TestServerFailureOfMalformedQuestions(t *testing.T) {
	for _, q := range [][]byte{make([]byte, 12), append([]byte{0, 1, 1, 0, 0, 9, 0, 0, 0, 0, 0, 0}, 0xff, 'a'), append(dnsQuestion()[:14], 63)} {
		a := serverFailure(q)
		if len(a) < dnsHeader || a[3]&0xf != 2 {
			t.Errorf("%x is answered by %x", q, a)
		}
	}
}
