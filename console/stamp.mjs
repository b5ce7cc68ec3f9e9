// Writes the digest of the source beside the build, so that a test can tell whether it is current.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const sources = readdirSync("src", { recursive: true })
  .map(String)
  .filter((name) => /\.(ts|tsx|css|json)$/.test(name))
  .map((name) => join("src", name));
const digest = createHash("sha256");
for (const name of [...sources, "index.html", "learn.html", "package-lock.json"].sort()) {
  digest.update(name).update("\0").update(readFileSync(name)).update("\0");
}
writeFileSync("../src/prfaas/gateway/console/assets/SOURCE", `${digest.digest("hex")}\n`);
