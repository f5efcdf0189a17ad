package transport

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"
)

// Route chooses the address of each open. A name may have many; an open takes one that was not tried since the last
// admission, in random order, so that a fleet spreads over the addresses and does not stay with a replica that does not
// answer. It is safe for concurrent use.
type Route struct {
	lookup func(ctx context.Context, host string) ([]string, error) // nil: names are dialed as they are
	dial   func(ctx context.Context, address string) (net.Conn, error)
	draw   func(n int64) int64

	mu    sync.Mutex
	tried map[string]struct{}
	known int // addresses at the last lookup
}

// NewRoute returns the route of a client. dial nil means TCP, and with it lookup nil the system's resolver; where dial
// is set and lookup nil, no lookup is made.
func NewRoute(
	lookup func(ctx context.Context, host string) ([]string, error),
	dial func(ctx context.Context, address string) (net.Conn, error),
	draw func(n int64) int64,
) *Route {
	r := &Route{lookup: lookup, dial: dial, draw: draw, tried: map[string]struct{}{}}
	if r.dial == nil {
		var d net.Dialer
		r.dial = func(ctx context.Context, address string) (net.Conn, error) {
			return d.DialContext(ctx, "tcp", address)
		}
		if r.lookup == nil {
			r.lookup = net.DefaultResolver.LookupHost
		}
	}
	return r
}

// Admitted forgets which addresses were tried.
func (r *Route) Admitted() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.tried)
}

// Round returns the number of opens after which every address was tried, at least quickRound.
func (r *Route) Round() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return max(r.known, quickRound)
}

// Connect opens a connection to the first address that takes one, each within that time, and returns the connection and
// its address.
func (r *Route) Connect(ctx context.Context, endpoint string, within time.Duration) (net.Conn, string, error) {
	addresses, err := r.addresses(ctx, endpoint, within)
	if err != nil {
		return nil, "", err
	}
	var errs []error
	for _, address := range r.untried(addresses) {
		r.mu.Lock()
		r.tried[address] = struct{}{}
		r.mu.Unlock()
		conn, err := r.connectOne(ctx, address, within)
		if err == nil {
			return conn, address, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, "", errors.Join(errs...)
}

func (r *Route) connectOne(ctx context.Context, address string, within time.Duration) (net.Conn, error) {
	one, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	conn, err := r.dial(one, address)
	if err != nil && one.Err() != nil && ctx.Err() == nil {
		return nil, &PhaseError{phase: PhaseConnect, address: address, within: within}
	}
	return conn, err
}

// addresses returns the addresses of endpoint, as host:port.
func (r *Route) addresses(ctx context.Context, endpoint string, within time.Duration) ([]string, error) {
	host, port, err := net.SplitHostPort(endpoint)
	if err != nil || r.lookup == nil || net.ParseIP(host) != nil {
		return []string{endpoint}, nil // what is no host:port is the dialer's to refuse
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	hosts, err := r.lookup(ctx, host)
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", host, err)
	}
	addresses := make([]string, len(hosts))
	for i, h := range hosts {
		addresses[i] = net.JoinHostPort(h, port)
	}
	return addresses, nil
}

// untried returns the addresses that were not tried yet, in random order. When all were tried, a new round begins.
func (r *Route) untried(addresses []string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known = len(addresses)
	left := slices.DeleteFunc(slices.Clone(addresses), func(address string) bool {
		_, tried := r.tried[address]
		return tried
	})
	if len(left) == 0 {
		clear(r.tried)
		left = append(left, addresses...)
	}
	for i := len(left) - 1; i > 0; i-- {
		j := r.draw(int64(i + 1))
		left[i], left[j] = left[j], left[i]
	}
	return left
}
