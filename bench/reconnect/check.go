package reconnect

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// faults is what the API says of the nodes after all rounds.
type faults struct {
	away     []string       // nodes that are not connected
	inactive map[string]int // identities that are not active, by state
	present  map[string]int // present reasons of nodes
	periods  map[string]int // reasons that nodes have had since their enrolment
	incident map[string]int // by kind
}

// wrong are the reasons that no node has because nodeapi was killed.
var wrong = []commonv1.DriftReason{
	commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, commonv1.DriftReason_DRIFT_REASON_IDENTITY_HELD,
	commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED, commonv1.DriftReason_DRIFT_REASON_JOIN_STATE_LOST,
}

// none reports whether no node was called down or shut out, and all are connected.
func (f faults) none() bool {
	for _, reason := range wrong {
		if name := names.Of(reason); f.periods[name] > 0 || f.present[name] > 0 {
			return false
		}
	}
	return len(f.away) == 0 && len(f.inactive) == 0
}

func (f faults) describe(details map[string]any) {
	details["nodes_away"] = len(f.away)
	if len(f.away) > 0 {
		details["nodes_away_some"] = strings.Join(f.away[:min(len(f.away), 5)], " ")
	}
	for name, counts := range map[string]map[string]int{
		"identities_not_active": f.inactive, "reasons_present": f.present, "reasons_since_enrolment": f.periods,
		"incidents": f.incident,
	} {
		details[name] = counted(counts)
	}
}

// counted returns counts as text in the order of their names.
func counted(counts map[string]int) string {
	if len(counts) == 0 {
		return "none"
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		out = append(out, fmt.Sprintf("%s: %d", name, counts[name]))
	}
	return strings.Join(out, ", ")
}

// check reads from the API which nodes are connected, and what was concluded of each.
func (w *world) check(ctx context.Context) (faults, error) {
	f := faults{inactive: map[string]int{}, present: map[string]int{}, periods: map[string]int{}, incident: map[string]int{}}
	client := w.cluster.Client
	var nodes []string
	for token, first := "", true; first || token != ""; first = false {
		page, err := client.Query.ListNodes(ctx, &readmodelv1.ListNodesRequest{PageSize: 1000, PageToken: token})
		if err != nil {
			return f, fmt.Errorf("list nodes: %w", err)
		}
		for _, n := range page.GetItems() {
			nodes = append(nodes, n.GetNodeId())
			if !n.GetConnected() {
				f.away = append(f.away, n.GetName())
			}
			if s := n.GetIdentity().GetState(); s != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
				f.inactive[names.Of(s)]++
			}
			if n.GetReason() != "" {
				f.present[n.GetReason()]++
			}
		}
		token = page.GetNextPageToken()
	}
	if len(nodes) != w.opts.Agents {
		return f, fmt.Errorf("the API lists %d nodes of %d", len(nodes), w.opts.Agents)
	}
	if err := w.periods(ctx, nodes, f.periods); err != nil {
		return f, err
	}
	incidents, err := client.Incidents.ListIncidents(ctx, &readmodelv1.ListIncidentsRequest{PageSize: 100})
	if err != nil {
		return f, fmt.Errorf("list incidents: %w", err)
	}
	for _, i := range incidents.GetItems() {
		f.incident[names.Of(i.GetKind())]++
	}
	return f, nil
}

// periods counts the verdicts on each node that have begun since its enrolment, by reason.
func (w *world) periods(ctx context.Context, nodes []string, into map[string]int) error {
	const atOnce = 8
	var mu sync.Mutex
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for _, id := range nodes {
		group.Go(func() error {
			list, err := w.cluster.Client.Query.ListNodeVerdicts(ctx,
				&readmodelv1.ListNodeVerdictsRequest{Node: id, PageSize: 1000})
			if err != nil {
				return fmt.Errorf("list verdicts of %s: %w", id, err)
			}
			mu.Lock()
			defer mu.Unlock()
			for _, p := range list.GetItems() {
				into[names.Of(p.GetReason())]++
			}
			return nil
		})
	}
	return group.Wait()
}

// The statements below are run as the administrator of the server: no role of a service reads all of it.
var (
	newestEvent = pg.Define(pg.RoleOwner, "reconnect.newest_event", `
	SELECT COALESCE(max(e.seq), 0) FROM events.event e`)
	countEvents = pg.Define(pg.RoleOwner, "reconnect.count_events", `
	SELECT e.kind AS name, count(*) AS n FROM events.event e WHERE e.seq > $1 GROUP BY 1 ORDER BY 1`)
	countVerdicts = pg.Define(pg.RoleOwner, "reconnect.count_verdicts", `
	SELECT 'verdicts' AS name, count(*) AS n FROM recovery.verdict v
		WHERE v.node_id <> '00000000-0000-0000-0000-000000000000'
	UNION ALL SELECT 'periods', count(*) FROM recovery.verdict_period p
		WHERE p.node_id <> '00000000-0000-0000-0000-000000000000'`)
)

// written is the number of rows of a kind.
type written struct {
	Name string `db:"name"`
	N    int64  `db:"n"`
}

// eventLog reads what the outages have left in the database.
type eventLog struct {
	conn *pgx.Conn
	from int64 // the newest event before the first outage
}

func (w *world) openLog(ctx context.Context) (eventLog, error) {
	conn, err := pgx.Connect(ctx, w.cluster.Stores.Postgres.AdminURLOf(pg.DatabaseMesh))
	if err != nil {
		return eventLog{}, fmt.Errorf("connect to the database: %w", err)
	}
	from, err := pg.Value[int64](ctx, conn, newestEvent)
	if err != nil {
		return eventLog{}, fmt.Errorf("read the newest event: %w", err)
	}
	return eventLog{conn: conn, from: from}, nil
}

func (l eventLog) close(ctx context.Context) { _ = l.conn.Close(context.WithoutCancel(ctx)) } // nothing is kept

// describe puts the events of each return, and the rows of verdicts on nodes, into details.
func (l eventLog) describe(ctx context.Context, details map[string]any, returns int) error {
	events, err := pg.All[written](ctx, l.conn, countEvents, l.from)
	if err != nil {
		return fmt.Errorf("count events: %w", err)
	}
	verdicts, err := pg.All[written](ctx, l.conn, countVerdicts)
	if err != nil {
		return fmt.Errorf("count verdicts: %w", err)
	}
	var all int64
	var kinds []string
	for _, e := range events {
		all += e.N
		if share := round(float64(e.N) / float64(returns)); share > 0 {
			kinds = append(kinds, fmt.Sprintf("%s %.2f", e.Name, share))
		}
	}
	details["events_each_return"] = round(float64(all) / float64(returns))
	details["events_each_return_by_kind"] = strings.Join(kinds, ", ")
	for _, v := range verdicts {
		details["rows_of_"+v.Name+"_on_nodes"] = v.N
	}
	return nil
}
