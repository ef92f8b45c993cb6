package netnat

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"
)

const (
	dnsPort = 53
	// dnsTimeout is how long one server may take; resolvers of libc ask again after five seconds.
	dnsTimeout = 3 * time.Second
	// dnsIdle closes a guest's flow to the DNS server that is not used.
	dnsIdle = 10 * time.Second
	// dnsInFlight bounds the questions over UDP that wait for an answer, each with a socket and a buffer here. Beyond it they are
	// dropped, as a busy server does: a guest that floods a slow server must not use up the host.
	dnsInFlight = 256
	// dnsHeader is the fixed part of a DNS message (RFC 1035, 4.1.1).
	dnsHeader  = 12
	resolvConf = "/etc/resolv.conf"
)

// resolver forwards DNS messages, unread, to the servers of the host's resolv.conf. Those are the host's own choice, so
// the policy does not apply to them (a host's server often is 127.0.0.53 or in a private range).
type resolver struct {
	// servers returns the addresses to ask, in order; it is called for each question since the file may change.
	servers func() []netip.AddrPort
	// waiting has one slot a question over UDP.
	waiting chan struct{}
}

func newResolver() *resolver {
	return &resolver{waiting: make(chan struct{}, dnsInFlight), servers: func() []netip.AddrPort {
		f, err := os.Open(resolvConf)
		if err != nil {
			return nil
		}
		defer f.Close()
		return parseResolvConf(f)
	}}
}

// parseResolvConf returns the name servers of a resolv.conf(5), at most three as in libc.
func parseResolvConf(r io.Reader) []netip.AddrPort {
	var out []netip.AddrPort
	for s := bufio.NewScanner(r); s.Scan() && len(out) < 3; {
		f := strings.Fields(s.Text())
		if len(f) < 2 || f[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(f[1]); err == nil {
			out = append(out, netip.AddrPortFrom(a, dnsPort))
		}
	}
	return out
}

// serveUDP answers the questions of one flow of the guest's.
func (r *resolver) serveUDP(in net.Conn) {
	buf := make([]byte, 65536)
	for {
		if err := in.SetReadDeadline(time.Now().Add(dnsIdle)); err != nil {
			return
		}
		n, err := in.Read(buf)
		if err != nil {
			return
		}
		select {
		case r.waiting <- struct{}{}:
		default:
			continue
		}
		question := append([]byte(nil), buf[:n]...)
		// A and AAAA come over one flow back to back: the answer to the first must not hold up the second.
		go func() {
			defer func() { <-r.waiting }()
			if answer := r.ask("udp", question, exchangeUDP); answer != nil {
				_, _ = in.Write(answer)
			}
		}()
	}
}

// serveTCP answers the questions of one connection, each with its two-byte length before it (RFC 1035, 4.2.2).
func (r *resolver) serveTCP(in net.Conn) {
	defer in.Close()
	for {
		if err := in.SetReadDeadline(time.Now().Add(dnsIdle)); err != nil {
			return
		}
		question, err := readDNS(in)
		if err != nil {
			return
		}
		answer := r.ask("tcp", question, exchangeTCP)
		if answer == nil || writeDNS(in, answer) != nil {
			return
		}
	}
}

// ask tries the servers in order. When none answers, or there is none, the guest gets SERVFAIL at once instead of a silence
// that costs it many seconds. nil means that the message is not a question.
func (r *resolver) ask(network string, question []byte, exchange func(net.Conn, []byte) ([]byte, error)) []byte {
	if len(question) < dnsHeader || question[2]&0x80 != 0 {
		return nil
	}
	for _, server := range r.servers() {
		c, err := net.DialTimeout(network, server.String(), dnsTimeout)
		if err != nil {
			continue
		}
		err = c.SetDeadline(time.Now().Add(dnsTimeout))
		var answer []byte
		if err == nil {
			answer, err = exchange(c, question)
		}
		_ = c.Close()
		if err == nil {
			return answer
		}
	}
	return serverFailure(question)
}

// serverFailure turns a question into an answer with RCODE 2 and the question section only.
func serverFailure(question []byte) []byte {
	answer := append([]byte(nil), question...)
	answer[2] |= 0x80                          // QR: an answer
	answer[3] = 0x80 | 2                       // RA, SERVFAIL
	binary.BigEndian.PutUint16(answer[6:], 0)  // no answers
	binary.BigEndian.PutUint16(answer[8:], 0)  // no authorities
	binary.BigEndian.PutUint16(answer[10:], 0) // no additional records: an EDNS record of the question is cut off
	end := dnsHeader
	for range binary.BigEndian.Uint16(answer[4:]) {
		for end < len(answer) && answer[end] != 0 {
			end += int(answer[end]) + 1
		}
		end += 1 + 4 // the root label, type and class
	}
	if end > len(answer) {
		// Malformed: answer with the bare header.
		binary.BigEndian.PutUint16(answer[4:], 0)
		end = dnsHeader
	}
	return answer[:end]
}

var errForeignAnswer = errors.New("the answer's id is not the question's")

func exchangeUDP(c net.Conn, question []byte) ([]byte, error) {
	if _, err := c.Write(question); err != nil {
		return nil, err
	}
	buf := make([]byte, 65536)
	n, err := c.Read(buf)
	if err != nil {
		return nil, err
	}
	if n < dnsHeader || buf[0] != question[0] || buf[1] != question[1] {
		return nil, errForeignAnswer
	}
	return buf[:n], nil
}

func exchangeTCP(c net.Conn, question []byte) ([]byte, error) {
	if err := writeDNS(c, question); err != nil {
		return nil, err
	}
	return readDNS(c)
}

func readDNS(r io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	msg := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err := io.ReadFull(r, msg)
	return msg, err
}

func writeDNS(w io.Writer, msg []byte) error {
	_, err := w.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(msg))), msg...))
	return err
}
