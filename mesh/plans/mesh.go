package plans

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/devstack/pgserver"
	"github.com/gpuaas/mesh/devstack/scratch"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/halt"
	"github.com/gpuaas/mesh/mesh/person"
)

// The names in a template. They have one width, so that their replacements fit into stored messages.
const (
	tenantName    = "tenant-00000"
	nodeName      = "node-000000"
	workspaceName = "w-00000000"
)

// Source describes how to make a template.
type Source struct {
	Agent   string // the agent's program; empty: beside this one
	Version string
	Ended   bool // the template has a workspace too that was recreated and decommissioned
	// Instances reports whether the machine of the template is an instance that was launched for its workspace, and not
	// one that was enrolled beforehand.
	Instances bool
	Logger    *slog.Logger
}

// discard takes the output for people.
type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// Make starts a mesh, enrols one machine, provisions one workspace on it, and returns the rows once the mesh is at
// rest.
func Make(ctx context.Context, src Source) (*Template, error) {
	var tmpl *Template
	err := withServer(ctx, src, func(ctx context.Context, server *pgserver.Server, dir string) error {
		var err error
		tmpl, err = makeTemplate(ctx, src, server, dir)
		return err
	})
	return tmpl, err
}

// Running is a mesh whose services run on a loaded fleet.
type Running struct {
	Mesh      *dev.Mesh
	ServerPID int    // of Postgres
	URL       string // logs in as the administrator
}

// Serve loads a fleet of the size, starts the services of a mesh on it, and calls fn while they run.
func Serve(ctx context.Context, src Source, size Size, fn func(ctx context.Context, r Running) error) error {
	return withServer(ctx, src, func(ctx context.Context, server *pgserver.Server, dir string) error {
		tmpl, err := makeTemplate(ctx, src, server, dir)
		if err != nil {
			return err
		}
		url, err := administrator(server.AdminURL(), pg.DatabaseMesh)
		if err != nil {
			return err
		}
		if err := tmpl.Load(ctx, url, size); err != nil {
			return err
		}
		if err := tmpl.writeLaunches(size); err != nil {
			return err
		}
		if size.Schemas {
			workloads, err := administrator(server.AdminURL(), pg.DatabaseWorkloads)
			if err != nil {
				return err
			}
			if err := makeSchemas(ctx, url, workloads); err != nil {
				return err
			}
		}
		return withMesh(ctx, src, server, dir, func(ctx context.Context, mesh *dev.Mesh) error {
			return fn(ctx, Running{Mesh: mesh, ServerPID: server.PID(), URL: url})
		})
	})
}

// withServer calls fn with a database server and a directory for a mesh, and removes both.
//
//nolint:nonamedreturns // what is removed at the end may fail
func withServer(ctx context.Context, src Source, fn func(context.Context, *pgserver.Server, string) error) (err error) {
	dir, err := scratch.Make(halt.Bench)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Remove()) }()
	server, err := pgserver.Start(ctx, pgserver.Config{Dir: filepath.Join(dir.Path(), "pg"), Logger: src.Logger})
	if err != nil {
		return fmt.Errorf("start the database of the template: %w", err)
	}
	defer func() {
		stopCtx, stop := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
		defer stop()
		err = errors.Join(err, server.Stop(stopCtx))
	}()
	return fn(ctx, server, filepath.Join(dir.Path(), "mesh"))
}

// makeTemplate makes the template with a mesh that it ends.
func makeTemplate(ctx context.Context, src Source, server *pgserver.Server, dir string) (*Template, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	var tmpl *Template
	err := withMesh(ctx, src, server, dir, func(ctx context.Context, mesh *dev.Mesh) error {
		var err error
		tmpl, err = fromMesh(ctx, src, mesh, server)
		return err
	})
	return tmpl, err
}

// withMesh calls fn while a mesh runs.
func withMesh(
	ctx context.Context, src Source, server *pgserver.Server, dir string, fn func(context.Context, *dev.Mesh) error,
) error {
	const free = "127.0.0.1:0"
	deps := dev.Deps{Logger: src.Logger, Out: discard{}, Err: discard{}, Version: src.Version, Began: time.Now()}
	mesh, err := dev.New(ctx, deps, dev.Config{
		DataDir: dir, NoDemo: true, AgentBinary: src.Agent, DatabaseURL: server.AdminURL(), SeededDatabase: true,
		ConsoleAddr: free, NodeAddr: free, EnrollAddr: free, MetricsAddr: free,
	})
	if err != nil {
		return fmt.Errorf("build the mesh of the template: %w", err)
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- mesh.Run(running) }()
	select {
	case err = <-ended:
		return errors.Join(errors.New("the mesh of the template ended by itself"), err)
	case <-ctx.Done():
		err = fmt.Errorf("start the mesh of the template: %w", context.Cause(ctx))
	case <-mesh.Ready():
		err = fn(running, mesh)
	}
	stop()
	if last := <-ended; last != nil && err == nil {
		err = fmt.Errorf("end the mesh of the template: %w", last)
	}
	return err
}

// fromMesh furnishes the mesh and captures its rows.
func fromMesh(ctx context.Context, src Source, mesh *dev.Mesh, server *pgserver.Server) (_ *Template, err error) {
	if !src.Instances {
		var stop func() error
		if stop, err = src.enrol(ctx, mesh); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	if err := src.provision(ctx, mesh.Client()); err != nil {
		return nil, err
	}
	url, err := administrator(server.AdminURL(), pg.DatabaseMesh)
	if err != nil {
		return nil, err
	}
	// As the administrator: the event log shows the owner nothing.
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("connect to the database of the template: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // nothing is kept
	if err := rest(ctx, conn); err != nil {
		return nil, err
	}
	tmpl, err := capture(ctx, conn, src.Instances)
	if err != nil || !src.Instances {
		return tmpl, err
	}
	if tmpl.launches, err = readLaunches(mesh.Plan().InstanceDir); err != nil {
		return nil, err
	}
	return tmpl, nil
}

// enrol enrols the machine of the template and runs its agent until the function that it returns is called.
func (src Source) enrol(ctx context.Context, mesh *dev.Mesh) (func() error, error) {
	binary, err := agents.Find(src.Agent)
	if err != nil {
		return nil, err
	}
	plan := mesh.Plan()
	agent, err := agents.New(src.Logger, agents.Config{
		Name: nodeName, Dir: filepath.Join(mesh.Dir(), "agents", nodeName), Binary: binary, TrustDomain: plan.TrustDomain,
		GPUs: 8, APIURL: plan.Addresses.Agents, EnrollURL: "https://" + plan.Addresses.Enroll,
		CAFile: plan.Material.ServiceRoots(),
	})
	if err != nil {
		return nil, err
	}
	list := []*agents.Agent{agent}
	if err := errors.Join(agent.Furnish(""), agents.Enrol(ctx, mesh.Client(), list)); err != nil {
		return nil, fmt.Errorf("enrol the machine of the template: %w", err)
	}
	running, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(running) }()
	stop := func() error {
		cancel()
		return <-ended
	}
	if n, err := agents.Await(ctx, mesh.Client(), list, time.Minute); err != nil || n != 1 {
		return nil, errors.Join(errors.New("the machine of the template did not connect"), err, stop())
	}
	return stop, nil
}

// provision makes the tenant, the workspace that ends if there is to be one, and the workspace that stands.
func (src Source) provision(ctx context.Context, client *person.Client) error {
	if _, err := client.Command.CreateTenant(ctx, &readmodelv1.CreateTenantRequest{Name: tenantName}); err != nil {
		return fmt.Errorf("create the tenant of the template: %w", err)
	}
	if src.Ended {
		if err := src.liveAndEnd(ctx, client); err != nil {
			return err
		}
	}
	return src.create(ctx, client, workspaceName)
}

// create makes a workspace of the tenant, and waits until it is active.
func (src Source) create(ctx context.Context, client *person.Client, name string) error {
	driver := commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC
	if src.Instances {
		driver = commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS
	}
	_, err := client.Command.CreateWorkspace(ctx, &readmodelv1.CreateWorkspaceRequest{
		Tenant: tenantName, Name: name, IdempotencyKey: name, Spec: &lifecyclev1.WorkspaceSpec{Placement: driver},
	})
	if err != nil {
		return fmt.Errorf("create workspace %s of the template: %w", name, err)
	}
	return await(ctx, client, tenantName+"/"+name, commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, 0)
}

// administrator returns the address of a database for the administrator of its server.
func administrator(adminURL, database string) (string, error) {
	cfg, err := pgx.ParseConfig(adminURL)
	if err != nil {
		return "", fmt.Errorf("read the address of the database: %w", err)
	}
	return pg.WithUser(adminURL, cfg.User, cfg.Password, database)
}

var atRest = pg.Define(pg.RoleOwner, "plans.at_rest", `
	SELECT EXISTS (SELECT FROM readmodel.observed)
		AND EXISTS (SELECT FROM lifecycle.observed_workload)
		AND EXISTS (SELECT FROM readmodel.run r WHERE NOT r.live)
		AND NOT EXISTS (SELECT FROM lifecycle.saga_run r WHERE r.finished_at IS NULL)
		AND NOT EXISTS (SELECT FROM lifecycle.task t WHERE t.open)
		AND (SELECT min(c.pos) FROM readmodel.event_cursor c) >= (SELECT max(c.pos) FROM lifecycle.event_cursor c)`)

// rest waits until the workspace's first report is projected and nothing is under way.
func rest(ctx context.Context, conn *pgx.Conn) error {
	for {
		done, err := pg.Value[bool](ctx, conn, atRest)
		if err != nil {
			return fmt.Errorf("wait until the mesh of the template is at rest: %w", err)
		}
		if done {
			return nil
		}
		if !app.Sleep(ctx, 100*time.Millisecond) {
			return errors.New("the mesh of the template does not come to rest")
		}
	}
}
