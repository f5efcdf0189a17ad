package opened

import "github.com/gpuaas/mesh/internal/pg"

var (
	readOpened = pg.Define(pg.RoleRecovery, "identity.read_opened_sessions", `
		SELECT `+pg.Columns[stored]("o")+` FROM recovery.session_open o WHERE o.session_id = ANY($1::uuid[])`)

	insertSessions = pg.Define(pg.RoleRecovery, "identity.insert_opened_sessions", `
		INSERT INTO recovery.session_open (session_id, node_id, node_instance_id, verdict, serial, put_for, replaces_nonce,
			replica_id, boot_id, machine_id, remote_address, agent_version, generation, era, fence_epoch, key_id)
		SELECT o.session_id, o.node_id, o.node_instance_id, o.verdict, o.serial, o.put_for, o.replaces_nonce, o.replica_id,
			o.boot_id, o.machine_id, o.remote_address, o.agent_version, o.generation, o.era, o.fence_epoch, o.key_id
		FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
			$9::text[],
			$10::text[], $11::text[], $12::text[], $13::bigint[], $14::bigint[], $15::bigint[], $16::text[]) AS o (session_id,
				node_id, node_instance_id, verdict,
			serial, put_for, replaces_nonce, replica_id, boot_id, machine_id, remote_address, agent_version, generation, era,
				fence_epoch, key_id)`)

	recordAnswer = pg.Define(pg.RoleRecovery, "identity.record_answer", `
		UPDATE recovery.session_open SET answer = $2 WHERE session_id = $1 AND answer = ''`)
)
