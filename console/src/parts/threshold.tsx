// The offload threshold of all links, to be changed until the gateway restarts.

import { useState } from "preact/hooks";
import { post, type State } from "../api";
import { count } from "../format";
import { ask } from "./confirm";

export function Threshold({ state }: { state: State }) {
  const [said, setSaid] = useState("");
  const links = Object.values(state.sample.links);
  const present = links.map((link) => link.offload_threshold).find((tokens) => tokens != null);
  if (present == null) return null;
  const set = (event: SubmitEvent) => {
    event.preventDefault();
    const tokens = Number(new FormData(event.currentTarget as HTMLFormElement).get("tokens"));
    ask({
      action: `Offload above ${count(tokens)} tokens`,
      text: "This sets the threshold of all links until the gateway restarts. No loop moves it until it is given back.",
      run: () =>
        post("../control/threshold", { tokens }).then(() =>
          setSaid(`Prompts with more than ${count(tokens)} new tokens go away.`),
        ),
    });
  };
  return (
    <form class="threshold" onSubmit={set}>
      <label>
        Offload above{" "}
        <input name="tokens" type="number" min="1" step="1" required placeholder={`${present}`} />{" "}
        new tokens
      </label>
      <button type="submit">Set until restart</button>
      {said && <span role="status">{said}</span>}
    </form>
  );
}
