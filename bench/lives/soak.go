package lives

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/devstack/pgserver"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/dev"
)

// MostGrowth is by how much a size may rise from Warmup to the end of a soak, as a share of its mean.
const MostGrowth = 0.01

// Warmup is the time into a soak from which on sizes are judged; of a soak shorter than three times as long, a third
// is.
const Warmup = 15 * time.Minute

// SoakOptions describes what to measure.
type SoakOptions struct {
	Options

	Length time.Duration // default 45 minutes
	Every  time.Duration // between two samples; default 15 s
	Pace   time.Duration // between the beginnings of two lives; default 6 s
}

// sample holds the sizes at one time, in bytes, in the order of measures.
type sample struct {
	At     time.Duration // since the first life
	Values [5]int64
	Lives  int64 // begun
}

// measures are the names of the values of a sample.
var measures = [5]string{"database", "log files", "mesh memory", "memory an agent", "postgres memory"}

var databaseSize = pg.Define(pg.RoleOwner, "lives.database_size", `SELECT pg_database_size(current_database())`)

// Soak makes lives for a time, and judges whether sizes go on growing.
func Soak(ctx context.Context, o SoakOptions) (bench.Result, error) {
	if o.Length < 0 || o.Clients < 0 {
		return bench.Result{}, fmt.Errorf("bench soak: %s of %d clients", o.Length, o.Clients)
	}
	o = config.Or(o, SoakOptions{
		Options: defaults, Length: 45 * time.Minute, Every: 15 * time.Second, Pace: 6 * time.Second,
	})
	var samples []sample
	var late int64
	err := o.inMesh(ctx, func(ctx context.Context, mesh *dev.Mesh, server *pgserver.Server) error {
		var err error
		samples, late, err = o.soak(ctx, mesh, server)
		return err
	}, func(context.Context, *pgserver.Server) error { return nil })
	if err != nil {
		return bench.Result{}, err
	}
	return o.verdict(samples, late)
}

// soak makes lives until the time is over, and samples meanwhile. It returns the samples, and how many lives did not
// begin because as many as there are clients were under way.
func (o SoakOptions) soak(ctx context.Context, mesh *dev.Mesh, server *pgserver.Server) ([]sample, int64, error) {
	conn, err := connect(ctx, server)
	if err != nil {
		return nil, 0, err
	}
	defer conn.Close(context.WithoutCancel(ctx)) // nothing is kept
	w := &world{o: o.Options, client: mesh.Client()}
	if err := w.tenant(ctx); err != nil {
		return nil, 0, err
	}
	var late int64
	began := time.Now()
	over := func() bool { return time.Since(began) >= o.Length }
	group, ctx := errgroup.WithContext(ctx)
	// How many rows are kept depends on the lives of the last minutes, so lives begin at an even pace, and not as fast as
	// the machine allows.
	places := make(chan struct{}, o.Clients)
	group.Go(func() error {
		next := time.NewTicker(o.Pace)
		defer next.Stop()
		for !over() {
			select {
			case places <- struct{}{}:
				group.Go(func() error {
					defer func() { <-places }()
					return w.one(ctx, fmt.Sprintf("w-%08d", w.number.Add(1)))
				})
			default:
				late++
			}
			select {
			case <-next.C:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		return nil
	})
	var samples []sample
	var from, until sizes // of each table and index, when sizes begin to be judged and at the end
	group.Go(func() error {
		for !over() {
			if from == nil && time.Since(began) >= min(Warmup, o.Length/3) {
				if from, err = readBy(ctx, conn, listFiles); err != nil {
					return err
				}
			}
			s, err := o.sample(ctx, conn, mesh.Dir(), server.LogPath())
			if err != nil {
				return err
			}
			s.At, s.Lives = time.Since(began), w.number.Load()
			samples = append(samples, s)
			if err := s.print(o); err != nil {
				return err
			}
			if !app.Sleep(ctx, min(o.Every, max(o.Length-time.Since(began), time.Millisecond))) {
				return context.Cause(ctx)
			}
		}
		until, err = readBy(ctx, conn, listFiles)
		return err
	})
	if err := group.Wait(); err != nil {
		return nil, 0, fmt.Errorf("soak: %w", err)
	}
	return samples, late, o.printGrown(from, until)
}

func (o SoakOptions) sample(ctx context.Context, conn *pgx.Conn, files ...string) (sample, error) {
	var s sample
	var err error
	if s.Values[0], err = pg.Value[int64](ctx, conn, databaseSize); err != nil {
		return s, fmt.Errorf("read the size of the database: %w", err)
	}
	for _, path := range files {
		n, err := sizeOf(path)
		if err != nil {
			return s, err
		}
		s.Values[1] += n
	}
	s.Values[2], s.Values[3], s.Values[4], err = memory(os.Getpid())
	return s, err
}

// sizeOf returns the size of a log, or of all logs in a directory, launch logs included. A file that vanishes meanwhile
// counts as empty.
func sizeOf(path string) (int64, error) {
	total := int64(0)
	err := filepath.WalkDir(path, func(path string, entry os.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && (strings.HasSuffix(path, ".log") || strings.HasSuffix(path, ".jsonl")) {
			var info os.FileInfo
			if info, err = entry.Info(); err == nil {
				total += info.Size()
			}
		}
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("add up files: %w", err)
	}
	return total, nil
}

// memory adds up the private resident memory of a process and of Postgres below it, and returns the mean of all others
// that descend from it, which are agents and their workloads: how many there are depends on the moment.
func memory(root int) (own, others, postgres int64, err error) { //nolint:nonamedreturns // they name what is counted
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, 0, 0, fmt.Errorf("list processes: %w", err)
	}
	parent, bytes, name := map[int]int{}, map[int]int64{}, map[int]string{}
	for _, dir := range dirs {
		text, err := os.ReadFile(filepath.Join(dir, "status"))
		if err != nil {
			continue // it has ended
		}
		pid, _ := strconv.Atoi(filepath.Base(dir)) // the pattern has digits alone
		for line := range strings.Lines(string(text)) {
			key, value, _ := strings.Cut(line, ":")
			first, _, _ := strings.Cut(strings.TrimSpace(value), " ")
			n, _ := strconv.ParseInt(first, 10, 64) // zero for what is no number
			switch key {
			case "Name":
				name[pid] = strings.TrimSpace(value)
			case "PPid":
				parent[pid] = int(n)
			case "RssAnon":
				bytes[pid] = n << 10
			}
		}
	}
	count := int64(0)
	for pid, n := range bytes {
		above := pid
		for above > 1 && above != root {
			above = parent[above]
		}
		switch {
		case pid == root:
			own += n
		case above != root:
		case strings.HasPrefix(name[pid], "postgres"):
			postgres += n
		default:
			others += n
			count++
		}
	}
	return own, others / max(count, 1), postgres, nil
}

func (s sample) print(o SoakOptions) error {
	mib := func(n int64) float64 { return float64(n) / (1 << 20) }
	var table strings.Builder
	if s.At < o.Every {
		fmt.Fprintf(&table, "%8s %8s %12s %14s %12s %15s %16s\n", "minute", "lives", "database", "log files",
			"mesh memory", "memory an agent", "postgres memory")
	}
	v := s.Values
	fmt.Fprintf(&table, "%8.2f %8d %8.1f MiB %10.1f MiB %8.1f MiB %11.2f MiB %12.1f MiB\n", s.At.Minutes(), s.Lives,
		mib(v[0]), mib(v[1]), mib(v[2]), mib(v[3]), mib(v[4]))
	if _, err := io.WriteString(o.Out, table.String()); err != nil {
		return fmt.Errorf("print the table: %w", err)
	}
	return nil
}

// growth returns by how much one value rises over the samples, as a share of its mean, by the least-squares line
// through them.
func growth(samples []sample, value int) float64 {
	if len(samples) < 2 {
		return 0
	}
	var meanAt, mean float64
	for _, s := range samples {
		meanAt += s.At.Seconds() / float64(len(samples))
		mean += float64(s.Values[value]) / float64(len(samples))
	}
	var both, square float64
	for _, s := range samples {
		d := s.At.Seconds() - meanAt
		both, square = both+d*(float64(s.Values[value])-mean), square+d*d
	}
	if mean == 0 || square == 0 {
		return 0
	}
	return both / square * (samples[len(samples)-1].At - samples[0].At).Seconds() / mean
}

// printGrown prints the tables and indexes that grew most between two moments, and by how much.
func (o SoakOptions) printGrown(from, until sizes) error {
	names := slices.SortedFunc(maps.Keys(until), func(a, b string) int {
		return cmp.Or(cmp.Compare(until[b].Bytes-from[b].Bytes, until[a].Bytes-from[a].Bytes), cmp.Compare(a, b))
	})
	var table strings.Builder
	fmt.Fprintf(&table, "%-60s %14s %14s\n", "table or index", "grew by", "at the end")
	for _, name := range names[:min(len(names), 20)] {
		grew := until[name].Bytes - from[name].Bytes
		if grew <= 0 {
			break
		}
		fmt.Fprintf(&table, "%-60s %10d KiB %10d KiB\n", name, grew>>10, until[name].Bytes>>10)
	}
	if _, err := io.WriteString(o.Out, table.String()); err != nil {
		return fmt.Errorf("print the table: %w", err)
	}
	return nil
}

// afterWarmup returns the samples that are judged.
func afterWarmup(samples []sample, length time.Duration) []sample {
	i := slices.IndexFunc(samples, func(s sample) bool { return s.At >= min(Warmup, length/3) })
	if i < 0 {
		return nil
	}
	return samples[i:]
}

// verdict judges the largest growth.
func (o SoakOptions) verdict(samples []sample, late int64) (bench.Result, error) {
	kept := afterWarmup(samples, o.Length)
	if len(kept) < 3 {
		return bench.Result{}, fmt.Errorf("bench soak: %d samples are too few to judge", len(kept))
	}
	details := bench.Machine()
	maps.Copy(details, map[string]any{
		"baseline": "growth from the time on that is judged, as a share of the mean",
		"minutes":  o.Length.Minutes(), "clients": o.Clients, "lives": samples[len(samples)-1].Lives,
		"lives_left_out": late, "pace_s": o.Pace.Seconds(),
		"judged_from": kept[0].At.Round(time.Second).String(), "samples": len(kept),
	})
	most := -1.0
	for i, name := range measures {
		rise := growth(kept, i)
		details["growth_of_"+strings.ReplaceAll(name, " ", "_")] = rise
		most = max(most, rise)
	}
	return bench.Result{
		Name: "soak", Value: most * 100, Unit: "% growth", Baseline: MostGrowth * 100, Ratio: most / MostGrowth, Required: 1,
		Passed: most <= MostGrowth, Details: details,
	}, nil
}
