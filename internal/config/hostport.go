package config

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
)

// HostPort returns the host:port of an address of the control plane as agents are given it: `host:port`,
// `https://host[:port]` or `host`; the port defaults to 443. Anything else, plain http above all, is refused. It quotes
// no part of the address in an error but the scheme.
func HostPort(endpoint string) (string, error) {
	rest := endpoint
	if strings.Contains(endpoint, "://") {
		u, err := url.Parse(endpoint)
		if err != nil {
			return "", errors.New("not an address")
		}
		if u.Scheme != "https" {
			return "", fmt.Errorf("scheme %q: only https is spoken", u.Scheme)
		}
		if u.User != nil || u.RawQuery != "" || u.Fragment != "" || (u.Path != "" && u.Path != "/") {
			return "", errors.New("more than a host and a port")
		}
		rest = u.Host
	}
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		host, port = strings.Trim(rest, "[]"), "443"
		if strings.Contains(host, ":") && net.ParseIP(host) == nil {
			return "", errors.New("not host:port")
		}
	}
	if host == "" || port == "" || strings.ContainsAny(host, "/ @?#'\"") {
		return "", errors.New("not host:port")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", errors.New("not a port")
	}
	return net.JoinHostPort(host, port), nil
}
