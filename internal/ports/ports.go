package ports

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
)

// The kernel gives outgoing connections a local port of its ephemeral range, and a server whose port is one of them
// cannot start until that connection has ended. Ports are therefore picked below that range.
const (
	lowest          = 20000
	ephemeralFile   = "/proc/sys/net/ipv4/ip_local_port_range"
	ephemeralUsual  = 32768 // the default of Linux, if the file cannot be read
	attemptsPerPort = 256
)

// reservations last until they are released or the process ends: a server that is down must keep its port.
var reservations struct {
	sync.Mutex
	held map[int]net.Listener
}

// Free returns n loopback addresses, host:port, on which no process listens. No other call returns one of them, in any
// process on this machine, while this process lives.
func Free(ctx context.Context, n int) ([]string, error) {
	var out []string
	for range n {
		port, err := Pick(ctx, "127.0.0.1")
		if err != nil {
			return nil, err
		}
		out = append(out, net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	}
	return out, nil
}

// Pick returns a port on which no process listens at the host; an empty host means all addresses. It is reserved as
// Free's are.
func Pick(ctx context.Context, host string) (int, error) {
	highest := ephemeralFrom()
	var last error
	for range attemptsPerPort {
		port := lowest + rand.IntN(highest-lowest) // not a secret
		reservation, err := reserve(ctx, port)
		if err != nil {
			last = err
			continue
		}
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			last = errors.Join(err, reservation.Close())
			continue
		}
		if err := l.Close(); err != nil {
			return 0, fmt.Errorf("pick a port: %w", err)
		}
		keep(port, reservation)
		return port, nil
	}
	return 0, fmt.Errorf("pick a port: none of %d between %d and %d is free: %w", attemptsPerPort, lowest, highest, last)
}

func keep(port int, reservation net.Listener) {
	reservations.Lock()
	defer reservations.Unlock()
	if reservations.held == nil {
		reservations.held = map[int]net.Listener{}
	}
	reservations.held[port] = reservation
}

// Release releases a picked port. A port that is not reserved is ignored.
func Release(port int) {
	reservations.Lock()
	defer reservations.Unlock()
	if l, ok := reservations.held[port]; ok {
		delete(reservations.held, port)
		_ = l.Close()
	}
}

// reserve binds the abstract socket that stands for a port. The kernel gives it to one process, and frees it when that
// process ends for any reason.
func reserve(ctx context.Context, port int) (net.Listener, error) {
	return (&net.ListenConfig{}).Listen(ctx, "unix", fmt.Sprintf("@gpuaas-port-%d", port))
}

// ephemeralFrom returns the first port that outgoing connections may get.
func ephemeralFrom() int {
	text, err := os.ReadFile(ephemeralFile)
	if err != nil {
		return ephemeralUsual
	}
	var from, to int
	if _, err := fmt.Sscan(string(text), &from, &to); err != nil || from < lowest+1000 {
		return ephemeralUsual
	}
	return from
}
