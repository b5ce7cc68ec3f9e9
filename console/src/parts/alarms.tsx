// The alarms of this moment: since when, and what to do.

import type { State } from "../api";
import { clock } from "../format";

/** Text with its `code` as code. */
export function Words({ text }: { text: string }) {
  return <>{text.split("`").map((part, number) => (number % 2 ? <code>{part}</code> : part))}</>;
}

export function Alarms({ state }: { state: State }) {
  if (!state.alarms.length)
    return (
      <p class="alarms calm" role="status">
        No alarms
      </p>
    );
  return (
    <ul class="alarms" role="alert">
      {state.alarms.map((alarm) => (
        <li class={alarm.severity} data-alarm={alarm.name} key={`${alarm.name} ${alarm.subject}`}>
          {alarm.text}
          <small>
            {alarm.since != null && `since ${clock(alarm.since)} · `}
            <Words text={alarm.todo} /> Steps: <code>{alarm.runbook}</code>
            {alarm.incident && (
              <>
                {" "}
                · <a href={`#/incidents/${alarm.incident}`}>incident {alarm.incident}</a>
              </>
            )}
          </small>
        </li>
      ))}
    </ul>
  );
}
