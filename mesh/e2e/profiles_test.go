package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// TestANodeMovesToAnotherAddressAndBack moves a node to a second address of the node API by `profiles set`, while the
// first one admits no node, and back. Between the two it refuses a version whose node API it cannot verify, though
// recovery could, and stays connected.
func TestANodeMovesToAnotherAddressAndBack(tt *testing.T) {
	t := beside(tt, 8*time.Minute)
	c := start(t, cluster.Config{Nodes: 1})
	before, agent, first := machines(t, c), c.Nodes[0], c.Plan.Addresses.Agents
	o := newOperator(t, c)
	replicas, err := c.Replicas(first)
	if err != nil {
		t.Fatal(err)
	}
	set := func(api string) []string {
		return []string{
			"profiles", "set", c.Plan.Profile, "--api", api, "--recovery", "https://" + c.Plan.Addresses.Enroll, "--ca-bundle",
			c.Material.ServiceRoots(), "--reason", "the site moves",
		}
	}
	at := func(version int, phase, api string) {
		t.Helper()
		t.must(fmt.Sprintf("the node to report version %d, %s", version, phase), time.Minute,
			func(ctx context.Context) error { return reported(ctx, o, version, phase) })
		t.must("the session at "+api+" to be admitted", time.Minute, func(context.Context) error {
			has, _, err := agent.Endpoints()
			if _, unconfirmed := os.Stat(filepath.Join(filepath.Dir(agent.LogPath()), "state",
				"former-profile.json")); !errors.Is(unconfirmed, fs.ErrNotExist) {
				return errors.Join(unconfirmed, errors.New("the former profile is kept"))
			}
			if err == nil && has != api {
				err = fmt.Errorf("the node API is looked for at %s", has)
			}
			return err
		})
		healed(t, c, before)
	}
	at(1, "active", first)
	if _, err := c.ShutOut(first, true); err != nil {
		t.Fatal(err)
	}
	o.does(set(replicas[0])...)
	at(2, "announced", replicas[0])
	o.does("profiles", "activate", c.Plan.Profile, "2", "--reason", "all nodes have it")
	at(2, "active", replicas[0])

	closed := answersOnce(t, replicas[1])
	conn, err := net.Dial("tcp", closed) // its only connection
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	o.refused("profile_unverified", "", set(closed)...)
	once := answersOnce(t, replicas[1])
	o.does(set(once)...)
	mesh := database(t, c, pg.DatabaseMesh)
	t.must("the refusal of the node", time.Minute, func(ctx context.Context) error {
		list, err := testkit.ReadEvents(ctx, mesh, `kind = 'session.changed'`)
		for _, e := range list {
			text, err := e.Payload()
			if err == nil && strings.Contains(string(text), "profile_unverified") && strings.Contains(string(text), once) {
				return nil
			}
		}
		return errors.Join(err, errors.New("it is in no event"))
	})
	record, err := agent.Diagnose(t.ctx)
	if err != nil || !strings.Contains(strings.ToLower(string(record)), "profile_refused") {
		t.Errorf("the host's record is %s, %v", record, err)
	}
	at(2, "active", replicas[0])

	if _, err := c.ShutOut(first, false); err != nil {
		t.Fatal(err)
	}
	o.does("profiles", "retire", c.Plan.Profile, "3", "--reason", "the node does not reach it")
	o.does("profiles", "activate", c.Plan.Profile, "1", "--reason", "the site stays")
	at(5, "active", first) // 4 is what was active when 3 was retired
	checkLogs(t, c, nil)
}

// reported returns nil if a version is in a phase, the one node reports it, and no other version is reported.
func reported(ctx context.Context, o *operator, version int, phase string) error {
	list, err := o.call(ctx, "profiles", "list")
	if err != nil {
		return err
	}
	items, _ := list.data["items"].([]any)
	found := false
	for _, item := range items {
		v, _ := item.(map[string]any)
		profile, _ := v["profile"].(map[string]any)
		same := fmt.Sprint(profile["version"]) == strconv.Itoa(version)
		want := "0"
		if same {
			found, want = v["phase"] == phase, "1"
		}
		if fmt.Sprint(v["nodes"]) != want {
			found = false
			break
		}
	}
	if !found {
		return fmt.Errorf("the list is %s", list.raw)
	}
	return nil
}

// answersOnce returns an address that passes its first connection on to a server, and closes all others.
func answersOnce(t test, to string) string {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() { _ = lis.Close(); wg.Wait() })
	wg.Go(func() {
		for n := 0; ; n++ {
			conn, err := lis.Accept()
			if err != nil {
				return
			}
			if n > 0 {
				_ = conn.Close()
				continue
			}
			wg.Go(func() { pass(conn, to) })
		}
	})
	return lis.Addr().String()
}

// pass passes what a connection sends on to a server, and the reverse, until one of them ends.
func pass(conn net.Conn, to string) {
	defer func() { _ = conn.Close() }()
	server, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	var wg sync.WaitGroup
	for _, pair := range [][2]net.Conn{{server, conn}, {conn, server}} {
		wg.Go(func() {
			_, _ = io.Copy(pair[0], pair[1])
			_, _ = pair[0].Close(), pair[1].Close()
		})
	}
	wg.Wait()
}
