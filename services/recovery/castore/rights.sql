-- A database that was restored from a backup of another one has grants to that one's role.
DO $$
DECLARE
    former text;
BEGIN
    FOR former IN
        SELECT r.rolname FROM pg_roles r
        WHERE r.rolname ~ '^mesh_ca_retention_[0-9]+$' AND r.rolname <> '@role@' AND EXISTS (
            SELECT FROM pg_class c, aclexplode(c.relacl) a WHERE a.grantee = r.oid AND c.oid IN (
                '@schema@.x509_certs'::regclass, '@schema@.x509_certs_data'::regclass, '@schema@.used_ott'::regclass,
                '@schema@.revoked_x509_certs'::regclass)
            UNION ALL SELECT FROM pg_namespace n, aclexplode(n.nspacl) a
            WHERE a.grantee = r.oid AND n.oid IN ('@schema@'::regnamespace, 'mesh_ca'::regnamespace))
    LOOP
        EXECUTE format('REVOKE ALL ON @schema@.x509_certs, @schema@.x509_certs_data, @schema@.used_ott, '
            '@schema@.revoked_x509_certs FROM %I', former);
        EXECUTE format('REVOKE ALL ON SCHEMA @schema@, mesh_ca FROM %I', former);
    END LOOP;
END $$;

GRANT USAGE ON SCHEMA @schema@ TO @role@;
GRANT USAGE, CREATE ON SCHEMA mesh_ca TO @role@;
GRANT SELECT, DELETE ON @schema@.x509_certs, @schema@.x509_certs_data, @schema@.used_ott, @schema@.revoked_x509_certs
    TO @role@;
ALTER FUNCTION mesh_ca.cut_ended_certificates(timestamptz, integer) OWNER TO @role@;
ALTER FUNCTION mesh_ca.cut_ended_tokens(timestamptz, integer) OWNER TO @role@;
ALTER FUNCTION mesh_ca.cut_ended_revocations(timestamptz, integer) OWNER TO @role@;
REVOKE CREATE ON SCHEMA mesh_ca FROM @role@;
REVOKE ALL ON FUNCTION mesh_ca.cut_ended_certificates(timestamptz, integer),
    mesh_ca.cut_ended_tokens(timestamptz, integer), mesh_ca.cut_ended_revocations(timestamptz, integer) FROM PUBLIC;
DO $$
BEGIN
    EXECUTE format('GRANT EXECUTE ON FUNCTION mesh_ca.cut_ended_certificates(timestamptz, integer), '
        'mesh_ca.cut_ended_tokens(timestamptz, integer), mesh_ca.cut_ended_revocations(timestamptz, integer) TO %I',
        session_user);
END $$;
