package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/rig"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/person"
	"github.com/gpuaas/mesh/mesh/plans"
)

// The requirement on the list of workspaces at the API: LeastLists requests a second over as many connections as
// listConnections, each for a page of listPage.
const (
	LeastLists      = 1500.0
	listConnections = 50
	listPage        = 8
)

// ListOptions describes how to measure the list of workspaces.
type ListOptions struct {
	Nodes, Workspaces int           // 100 and 1,000
	Length            time.Duration // 10 s, after a fifth of it that is not counted
	Profile           string        // a file for the profile of this process; empty: none
	Agent, Version    string
	Logger            *slog.Logger
}

// RunList measures how many requests for a page of workspaces the API serves in a second.
func RunList(ctx context.Context, o ListOptions) (bench.Result, error) {
	o = config.Or(o, ListOptions{Length: 10 * time.Second, Logger: slog.New(slog.DiscardHandler)})
	var result bench.Result
	err := plans.Serve(ctx, plans.Source{Agent: o.Agent, Version: o.Version, Logger: o.Logger},
		plans.Size{Nodes: o.Nodes, Workspaces: o.Workspaces}, func(ctx context.Context, r plans.Running) error {
			var err error
			result, err = lists(ctx, o, r)
			return err
		})
	return result, err
}

// lists calls from all connections, first without counting.
func lists(ctx context.Context, o ListOptions, r plans.Running) (bench.Result, error) {
	clients, err := connect(r.Mesh)
	if err != nil {
		return bench.Result{}, err
	}
	if _, err := call(ctx, clients, o.Length/5); err != nil {
		return bench.Result{}, err
	}
	if o.Profile != "" {
		file, err := os.Create(o.Profile)
		if err != nil {
			return bench.Result{}, fmt.Errorf("make the file of the profile: %w", err)
		}
		defer file.Close() // what it lacks shows
		if err := pprof.StartCPUProfile(file); err != nil {
			return bench.Result{}, fmt.Errorf("profile: %w", err)
		}
		defer pprof.StopCPUProfile()
	}
	// a process id
	began, own, server := time.Now(), rig.ProcessorTime(int32(os.Getpid())), rig.ServerTime(r.ServerPID)
	took, err := call(ctx, clients, o.Length)
	if err != nil {
		return bench.Result{}, err
	}
	passed := time.Since(began)
	// a process id
	own, server = rig.ProcessorTime(int32(os.Getpid()))-own, rig.ServerTime(r.ServerPID)-server
	each := func(spent time.Duration) float64 { return float64(spent.Microseconds()) / 1e3 / float64(len(took)) }
	details := bench.Machine()
	maps.Copy(details, map[string]any{
		"connections": listConnections, "rows": listPage,
		"p50_ms": bench.Percentile(took, 0.5), "p99_ms": bench.Percentile(took, 0.99),
		"services_and_client_cpu_ms": each(own), "database_cpu_ms": each(server),
		"baseline": "requests a second that the API is to serve",
	})
	rate := float64(len(took)) / passed.Seconds()
	return bench.Result{
		Name: "list", Value: rate, Unit: "lists of workspaces a second", Baseline: LeastLists, Ratio: rate / LeastLists,
		Required: 1, Passed: rate >= LeastLists, Details: details,
	}, nil
}

// connect makes a client for each connection.
func connect(mesh *dev.Mesh) ([]*person.Client, error) {
	plan := mesh.Plan()
	token, err := os.ReadFile(filepath.Join(plan.Material.Dir, "person.token"))
	if err != nil {
		return nil, fmt.Errorf("read the token of the mesh's person: %w", err)
	}
	roots, err := pki.LoadBundle(plan.Material.ServiceRoots())
	if err != nil {
		return nil, fmt.Errorf("read the issuer of the mesh: %w", err)
	}
	var clients []*person.Client
	for range listConnections {
		client, err := person.Dial(person.Config{
			Server: plan.Addresses.Console, TrustDomain: plan.TrustDomain, Roots: roots, Token: strings.TrimSpace(string(token)),
		})
		if err != nil {
			return nil, err
		}
		clients = append(clients, client)
	}
	return clients, nil
}

// call requests pages until the time is over, one request of each client after the other.
func call(ctx context.Context, clients []*person.Client, length time.Duration) ([]time.Duration, error) {
	each := make([][]time.Duration, len(clients))
	group, ctx := errgroup.WithContext(ctx)
	began := time.Now()
	for i, client := range clients {
		group.Go(func() error {
			for time.Since(began) < length {
				sent := time.Now()
				page, err := client.Query.ListWorkspaces(ctx, &readmodelv1.ListWorkspacesRequest{
					PageSize: listPage,
				})
				if err != nil {
					return fmt.Errorf("list workspaces: %w", err)
				}
				if len(page.GetItems()) != listPage {
					return errors.New("a page of workspaces has fewer rows than asked for")
				}
				each[i] = append(each[i], time.Since(sent))
			}
			return nil
		})
	}
	err := group.Wait()
	return slices.Concat(each...), err
}
